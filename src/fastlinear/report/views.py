"""From a result's JSON to exactly what its template shows, missing fields made explicit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

STATUSES = ("kept", "rejected", "refused", "undecided", "nothing_to_do")
_STATUS_MEANING = {
    "kept": "Rewritten and verified: faster beyond noise; of a plan, not slower beyond noise.",
    "rejected": "Tried and undone: not faster beyond noise, or less accurate than allowed.",
    "refused": "Not touched: rewriting could change what the model means.",
    "undecided": "Left as it was: no measurement says whether a rewrite would help.",
    "nothing_to_do": "Healthy: no rewrite would help.",
}
_OF_ONE_CALL = {"predicted": "predicted_gain_us", "before": "before_us", "after": "after_us"}
_TOP_MODULES = 15
_WORST_VERDICTS = 12


def optimize(data: dict[str, Any]) -> dict[str, Any]:
    """What the page of ``fastlinear optimize`` shows."""
    step = data.get("step") or {}
    samples = step.get("samples") or {}
    sites = _sites(data.get("sites") or [])
    ratios = [s["ci95"][1] for s in sites if s["ci95"]]
    profiled = data.get("profile")
    if profiled and "not_followed" in data:
        profiled = profiled | {"not_followed": data["not_followed"]}
    kept = (data.get("summary") or {}).get("kept", 0)
    return {
        "title": (data.get("model") or {}).get("class", "model"),
        "mode": data.get("mode", ""),
        "created": str(data.get("created", ""))[:16].replace("T", " "),
        "model": data.get("model") or {},
        "speedup": step.get("speedup") if kept else None,
        "before_us": step.get("before_us"),
        "after_us": step.get("after_us"),
        "strips": [
            ("before", "before", samples.get("before") or []),
            ("after", "after", samples.get("after") or []),
        ],
        "summary": {name: (data.get("summary") or {}).get(name, 0) for name in STATUSES},
        "groups": _groups(sites),
        "ratio_top": max([2.0, *ratios]) * 1.02,
        **_verdicts(data.get("verdicts") or []),
        "profile": profile(profiled) if profiled else None,
        "notes": [str(note) for note in data.get("notes") or []],
        "environment": environment(data.get("environment")),
        "device": device_name(data),
        "version": data.get("fastlinear", ""),
    }


def profile(data: dict[str, Any]) -> dict[str, Any]:
    """What the page of ``fastlinear profile`` shows."""
    records = data.get("records") or []
    on_device = any((r.get("device_us") or 0) > 0 for r in records)
    field = "device_us" if on_device else "cpu_us"
    modules: dict[str, dict[str, Any]] = {}
    ops: dict[str, float] = defaultdict(float)
    for r in records:
        us = r.get(field) or 0.0
        entry = modules.setdefault(
            r["fqn"],
            {"fqn": r["fqn"], "class": r.get("module_class", ""), "forward": 0.0, "backward": 0.0},
        )
        entry["backward" if r.get("direction") == "backward" else "forward"] += us
        ops[r.get("op", "")] += us
    ranked = sorted(modules.values(), key=lambda m: -(m["forward"] + m["backward"]))
    findings = sorted(
        data.get("findings") or [], key=lambda f: -(f.get("predicted_gain_us") or 0.0)
    )
    return {
        "title": data.get("model_class") or (data.get("model") or {}).get("class", "Profile"),
        "mode": data.get("mode", ""),
        "clock": "device time" if on_device else "CPU time",
        "step_us": data.get("step_us"),
        "attributed": data.get("attributed"),
        "notes": [str(note) for note in data.get("notes") or []],
        "unattributed": [tuple(u) for u in data.get("unattributed") or []][:5],
        "total_us": sum(m["forward"] + m["backward"] for m in ranked) or 1.0,
        "modules": ranked[:_TOP_MODULES],
        "more_modules": max(0, len(ranked) - _TOP_MODULES),
        "ops": sorted(ops.items(), key=lambda item: -item[1])[:10],
        "findings": _merge_findings(findings),
        "finding_count": len(findings),
        "sites": len(data.get("sites") or []),
        "not_followed": data.get("not_followed") or [],
        "environment": environment(data.get("environment")),
        "device": device_name(data),
    }


def index(data: dict[str, Any]) -> dict[str, Any]:
    """What a page over several optimize results shows."""
    reports = []
    for item in data.get("reports") or []:
        view = optimize(item["data"])
        reports.append(
            {"name": item["name"], "href": item["href"], "note": item.get("note"), **view}
        )
    highs = [r["speedup"]["high"] for r in reports if r["speedup"]]
    first = (data.get("reports") or [{"data": {}}])[0]["data"]
    return {
        "title": data.get("title", "Reports"),
        "reports": reports,
        "ratio_top": max([2.0, *highs]) * 1.02,
        "environment": environment(first.get("environment")),
        "device": device_name(first),
    }


def environment(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as flat (name, value) pairs; unset facts are left out."""
    pairs: list[tuple[str, str]] = []
    for key, value in (data or {}).items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            pairs += environment(value, f"{name}.")
        elif value not in (None, "", [], {}):
            pairs.append((name, str(value)))
    return pairs


def _sites(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbers of one call stand beside the first linear that it computes, and there alone."""
    parts: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for site in sites:
        if site.get("part_of"):
            parts[site["part_of"], site.get("rule") or ""].append(site)
    shown = []
    for site in sites:
        view = _site(site)
        for part in () if view["part_of"] else parts[view["fqn"], view["rule"]]:
            for name, key in _OF_ONE_CALL.items():
                if part.get(key) is not None:
                    view[name] = (view[name] or 0.0) + part[key]
        if view["part_of"]:
            view |= dict.fromkeys((*_OF_ONE_CALL, "speedup", "ci95"))
        shown.append(view)
    return shown


def _site(site: dict[str, Any]) -> dict[str, Any]:
    pair = site.get("ci95")
    backends, reason = site.get("backends") or {}, site.get("reason") or ""
    return {
        "fqn": site.get("fqn", ""),
        "rule": site.get("rule") or "",
        "activation": site.get("activation"),
        "problem": site.get("problem"),
        "status": site.get("status", ""),
        "code": site.get("code") or "",
        "reason": reason,
        "predicted": site.get("predicted_gain_us"),
        "before": site.get("before_us"),
        "after": site.get("after_us"),
        "speedup": site.get("speedup"),
        "ci95": tuple(pair) if pair and None not in pair else None,
        "backends": backends,
        "part_of": site.get("part_of"),
        "show_backends": not all(name in reason for name in backends.values()),
    }


def _groups(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for status in STATUSES:
        members = [s for s in sites if s["status"] == status]
        if members:
            groups.append(
                {
                    "status": status,
                    "meaning": _STATUS_MEANING[status],
                    "sites": members,
                    "open": status != "nothing_to_do",
                }
            )
    return groups


def _verdicts(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    def share(v: dict[str, Any]) -> float:
        if v.get("error") is None or not v.get("limit"):
            return float("inf") if not v.get("passed") else 0.0
        return float(v["error"] / v["limit"])

    ranked = sorted(({**v, "share": share(v)} for v in verdicts), key=lambda v: -v["share"])
    return {
        "verdicts": ranked[:_WORST_VERDICTS],
        "more_verdicts": ranked[_WORST_VERDICTS:],
        "verdict_count": len(ranked),
        "failed_count": sum(1 for v in ranked if not v.get("passed")),
    }


def _merge_findings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings of one kind and one title are shown once, with all the places they hold; those
    whose gain is counted elsewhere apart."""
    merged: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for f in findings:
        counted = (f.get("details") or {}).get("part_of") is None
        key = (f.get("code", ""), f.get("title", ""), counted)
        entry = merged.setdefault(
            key,
            {
                "code": f.get("code", ""),
                "title": f.get("title", ""),
                "places": [],
                "gain": 0.0,
                "timeline": _timeline(f.get("details") or {}),
            },
        )
        entry["places"].append(_place(f))
        entry["gain"] += f.get("predicted_gain_us") or 0.0
    return sorted(merged.values(), key=lambda e: -e["gain"])


def _timeline(details: dict[str, Any]) -> list[tuple[str, str, float, list[Any]]]:
    """Lanes of what a call ran before and would run after, where that was recorded."""
    found = details.get("timeline") or {}
    return [
        (name, name, float(found[name]["us"]), found[name]["spans"])
        for name in ("before", "after")
        if name in found
    ]


def _place(finding: dict[str, Any]) -> dict[str, Any]:
    """One finding's place, with how much of its time the roofline explains."""
    measured, floor = finding.get("measured_us"), finding.get("floor_us")
    return {
        "fqn": finding.get("fqn", ""),
        "message": finding.get("message", ""),
        "advice": (finding.get("details") or {}).get("advice"),
        "flops": finding.get("flops"),
        "bytes": finding.get("bytes"),
        "bound": finding.get("bound", ""),
        "floor": floor,
        "measured": measured,
        "roofline": floor / measured if measured and floor is not None else None,
        "gain": finding.get("predicted_gain_us"),
        "part_of": (finding.get("details") or {}).get("part_of"),
    }


def device_name(data: dict[str, Any]) -> str:
    """What the device of a result is called."""
    facts = data.get("environment") or {}
    device = facts.get("device")
    if isinstance(device, dict):
        return str(device.get("name", ""))
    return str(device or data.get("device") or "")
