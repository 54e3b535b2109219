"""The demonstration behind ``make demo``: optimize four models, then show what happened.

Each model goes through the command line exactly as a user would run it. Results, plans and
reports end in one folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = {
    "gpt2": "examples.models:gpt2",
    "bert": "examples.models:bert",
    "vit": "examples.models:vit",
    "digits": "examples.digits:trained_mlp",
}
NOTHING_PROFITABLE = 4
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the demonstration; 0 when every model was handled and the accuracy is unchanged."""
    arguments = _arguments()
    start = time.monotonic()
    out: Path = arguments.out
    device = arguments.device or _best_device()
    results = {}
    for name in arguments.models:
        print(f"\n{name}: fastlinear optimize {MODELS[name]} --device {device}", flush=True)
        results[name] = optimize(name, out / name, device, arguments.budget)
    notes = {}
    same = True
    if "digits" in results:
        same, notes["digits"] = check_accuracy(out / "digits" / "plan.json", device)
    write_index(results, notes, out / "report.html")
    show(results)
    for name, note in notes.items():
        print(f"{name}: {note}")
    print(f"\nreport: {_short(out / 'report.html')}")
    for name in results:
        print(f"  {name}: {_short(out / name)}/report.html, plan.json, result.json")
    print(f"{time.monotonic() - start:.0f} seconds")
    return 0 if same else 3


def optimize(name: str, folder: Path, device: str, budget: float) -> dict[str, Any]:
    """Run ``fastlinear optimize`` on one model; returns its JSON result."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fastlinear", "optimize", MODELS[name], "--json"]
    command += ["--device", device, "--budget", str(budget)]
    command += ["--html", str(folder / "report.html"), "--plan", str(folder / "plan.json")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, NOTHING_PROFITABLE):
        raise SystemExit(done.returncode)
    (folder / "result.json").write_text(done.stdout)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check_accuracy(plan: Path, device: str) -> tuple[bool, str]:
    """Accuracy of the trained digits MLP without and with its plan: must be identical."""
    import fastlinear as fl
    from examples.digits import accuracy, held_out_images, trained_mlp

    model = trained_mlp().to(device)
    before = accuracy(model)
    rewrites = json.loads(plan.read_text())["rewrites"]
    if rewrites:
        fl.apply_(model, plan, held_out_images().to(device))
    after = accuracy(model)
    note = f"test accuracy {before:.4f} before, {after:.4f} after ({len(rewrites)} rewrites)"
    return before == after, note if before == after else f"{note}: NOT THE SAME"


def write_index(results: dict[str, Any], notes: dict[str, str], path: Path) -> None:
    """One page that links the models' own reports."""
    from fastlinear.report import page

    reports = [
        {"name": name, "href": f"{name}/report.html", "note": notes.get(name), "data": data}
        for name, data in results.items()
    ]
    path.write_text(page({"kind": "index", "title": "Demo", "reports": reports}))


def show(results: dict[str, dict[str, Any]]) -> None:
    """The closing table: what was found where, predicted, measured, and what became of it."""
    from fastlinear.cli.console import table

    for name, data in results.items():
        step = data["step"]
        speedup = step["speedup"]
        title = f"{name} ({data['model']['class']})"
        if not data["summary"]["kept"]:
            title += ": nothing kept, the model is as it was"
        elif speedup:
            title += (
                f": {step['before_us'] / 1e3:.2f} ms -> {step['after_us'] / 1e3:.2f} ms, "
                f"{speedup['median']:.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}]"
            )
        columns = ("module", ">sites", "found", ">predicted", ">measured", "outcome", "why")
        table(title, columns, rows_of(data["sites"]))


def rows_of(sites: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for all layers that share name, finding and outcome (layer numbers become *)."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for site in sites:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", site["fqn"])
        reason = re.sub(r"\d+(\.\d+)?", "#", site["reason"] or "")
        key = (pattern, site["activation"] or "", site["status"], site["code"] or "", reason)
        groups.setdefault(key, []).append(site)
    order = ("kept", "rejected", "refused", "undecided", "nothing_to_do")
    rows = []
    for (pattern, activation, status, _, _), members in sorted(
        groups.items(), key=lambda item: order.index(item[0][2])
    ):
        found = "linear" if activation in ("", "none") else f"linear + {activation}"
        fqn = members[0]["fqn"] if len(members) == 1 else pattern
        rows.append(
            (
                fqn,
                str(len(members)),
                found,
                _total(members, lambda s: s["predicted_gain_us"]),
                _total(members, _measured_gain),
                status.replace("_", " "),
                members[0]["reason"] or "",
            )
        )
    return rows


def _measured_gain(site: dict[str, Any]) -> float | None:
    if site["before_us"] is None or site["after_us"] is None:
        return None
    return float(site["before_us"] - site["after_us"])


def _total(sites: list[dict[str, Any]], gain: Any) -> str:
    values = [v for v in map(gain, sites) if v is not None]
    return f"{sum(values) / 1e3:+.2f} ms" if values else "-"


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _short(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--device", help="default: cuda where torch sees it, else cpu")
    parser.add_argument("--budget", type=float, default=15, help="measuring seconds a model")
    arguments = parser.parse_args()
    arguments.models = arguments.models or list(MODELS)
    unknown = sorted(set(arguments.models) - set(MODELS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
