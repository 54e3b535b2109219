"""Results as plain data, shaped as the library writes them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "circle", "line", "rect", "br", "wbr", "i", "link", "img", "input", "hr"}

ENVIRONMENT: dict[str, Any] = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "triton": None,
    "device": {"kind": "cpu", "name": "Example CPU", "units": 2, "isa": "AVX512"},
    "threads": 2,
}


def problem(m: int, k: int, n: int, activation: str = "gelu_tanh") -> dict[str, Any]:
    """A Problem as JSON."""
    return {
        "family": "linear_act",
        "piece": "forward",
        "dims": {"M": m, "K": k, "N": n},
        "dtype": "float32",
        "device": "cpu",
        "options": {"activation": activation, "bias": "yes", "x": "rows", "w": "nk"},
        "needs_grad": False,
        "precision": "highest",
    }


def site(fqn: str, status: str, **changes: Any) -> dict[str, Any]:
    """A SiteOutcome as JSON."""
    data = {
        "fqn": fqn,
        "rule": "linear_act",
        "activation": "gelu_tanh",
        "problem": problem(128, 768, 3072),
        "status": status,
        "code": status,
        "reason": "",
        "predicted_gain_us": None,
        "before_us": None,
        "after_us": None,
        "speedup": None,
        "ci95": None,
        "backends": {},
    }
    return {**data, **changes}


def profile() -> dict[str, Any]:
    """A ProfileReport as JSON."""
    records = []
    for i in range(12):
        for name, us in (("attn.c_attn", 3100), ("attn.c_proj", 1020), ("mlp.c_fc", 4100)):
            records.append(
                {
                    "fqn": f"transformer.h.{i}.{name}",
                    "module_class": "Conv1D",
                    "op": "aten::addmm",
                    "direction": "forward",
                    "calls": 1,
                    "cpu_us": us + 10 * i,
                    "device_us": 0.0,
                }
            )
        records.append(
            {
                "fqn": f"transformer.h.{i}.mlp.act",
                "module_class": "NewGELUActivation",
                "op": "aten::mul",
                "direction": "forward",
                "calls": 8,
                "cpu_us": 2400.0,
                "device_us": 0.0,
            }
        )
    findings = [
        {
            "code": "linear_activation",
            "fqn": f"transformer.h.{i}.mlp.c_fc",
            "title": "Linear followed by gelu_tanh",
            "message": "The activation reads and writes every output again.",
            "measured_us": 6500.0,
            "floor_us": 1800.0,
            "predicted_gain_us": 2100.0,
            "flops": 6.0e8,
            "bytes": 1.1e7,
            "bound": "compute",
            "details": {},
        }
        for i in range(12)
    ]
    return {
        "kind": "profile",
        "format": 1,
        "model_class": "GPT2Model",
        "environment": ENVIRONMENT,
        "mode": "inference",
        "device": "cpu",
        "step_us": 151000.0,
        "attributed": 0.983,
        "unattributed": [["aten::to", 1200.0]],
        "records": records,
        "sites": [{"fqn": f"transformer.h.{i}.mlp.c_fc"} for i in range(12)],
        "findings": findings,
    }


def optimize() -> dict[str, Any]:
    """A Result as JSON: kept, rejected, refused and nothing-to-do sites."""
    sites = []
    for i in range(12):
        measured = {"predicted_gain_us": 2100.0, "before_us": 6600.0 + i}
        sites.append(
            site(
                f"transformer.h.{i}.mlp.c_fc",
                "kept" if i != 7 else "rejected",
                **measured,
                after_us=3900.0 if i != 7 else 6580.0,
                speedup=1.69 if i != 7 else 1.003,
                ci95=[1.61, 1.75] if i != 7 else [0.98, 1.02],
                reason="" if i != 7 else "not faster beyond noise",
                backends={"forward": "gemm_cpp"},
            )
        )
        sites.append(
            site(
                f"transformer.h.{i}.attn.c_proj",
                "nothing_to_do",
                activation="none",
                reason="a healthy linear",
            )
        )
    sites.append(
        site("lm_head", "refused", code="shared_weight", reason="<script>alert(1)</script> shared")
    )
    verdicts = [
        {
            "name": f"draw{i % 3}.hidden_states.{i}",
            "error": 3.1e-7 + i * 1e-9,
            "torch_error": 2.9e-7,
            "limit": 6.9e-7,
            "passed": True,
        }
        for i in range(20)
    ]
    before = [150900 + 700 * ((7 * i) % 11 - 5) for i in range(21)]
    after = [93100 + 600 * ((5 * i) % 13 - 6) for i in range(21)]
    return {
        "kind": "optimize",
        "format": 1,
        "fastlinear": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "environment": ENVIRONMENT,
        "model": {"class": "GPT2Model", "fingerprint": "0f3c", "parameters": 124_439_808},
        "mode": "inference",
        "device": "cpu",
        "step": {
            "before_us": 150900.0,
            "after_us": 93100.0,
            "speedup": {"median": 1.62, "low": 1.6, "high": 1.64},
            "samples": {"before": before, "after": after},
        },
        "profile": profile(),
        "sites": sites,
        "verdicts": verdicts,
        "summary": {"kept": 11, "rejected": 1, "refused": 1, "nothing_to_do": 12},
    }


class _Balance(HTMLParser):
    """Collects open tags; every closing tag must close the innermost one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.external: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset") and value and ":" in value:
                self.external.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def check_whole(html: str) -> None:
    """Assert that a page closes its tags, shows no None and refers to nothing outside it."""
    parser = _Balance()
    parser.feed(html)
    assert parser.open == []
    assert parser.external == []
    assert "<script" not in html
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "None" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
