"""A profile as plain text."""

from __future__ import annotations

import io
from collections import defaultdict

from fastlinear.profile.records import ProfileReport

_WIDTH = 110


def render(report: ProfileReport, rows: int) -> str:
    """Findings, slowest modules, Linear sites in short, and what is unattributed."""
    from rich.console import Console
    from rich.table import Table

    out = Console(file=io.StringIO(), width=_WIDTH, no_color=True, legacy_windows=False)
    out.print(
        f"{report.model_class}, {report.mode}, {report.device}: {report.step_us:.0f} µs a step, "
        f"{report.attributed:.1%} attributed to modules",
        highlight=False,
    )

    cuda = report.device.startswith("cuda")
    by_module: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for r in report.records:
        by_module[r.fqn, r.module_class][r.direction] += r.device_us if cuda else r.cpu_us
    total = sum(sum(times.values()) for times in by_module.values())
    total += sum(us for _, us in report.unattributed)
    slowest = sorted(by_module.items(), key=lambda item: -sum(item[1].values()))

    table = Table(title=f"Slowest modules (own {'kernel' if cuda else 'CPU'} time, µs per step)")
    table.add_column("module", overflow="fold")
    table.add_column("class")
    for name in ("forward", "backward", "share"):
        table.add_column(name, justify="right")
    for (fqn, cls), times in slowest[:rows]:
        share = sum(times.values()) / total if total else 0.0
        table.add_row(
            fqn or "(model)",
            cls,
            f"{times['forward']:.1f}",
            f"{times['backward']:.1f}",
            f"{share:.1%}",
        )
    out.print(table)

    if report.findings:
        table = Table(title="Findings (µs per step; gains are estimates and overlap)")
        table.add_column("module", overflow="fold")
        table.add_column("finding", overflow="fold")
        for name in ("measured", "floor", "gain"):
            table.add_column(name, justify="right")
        for f in report.findings[:rows]:
            table.add_row(
                f.fqn or "(model)",
                f.title,
                f"{f.measured_us:.1f}",
                f"{f.floor_us:.1f}",
                f"{f.predicted_gain_us:.1f}",
            )
        out.print(table)
        if len(report.findings) > rows:
            out.print(f"… and {len(report.findings) - rows} more findings.", highlight=False)
    else:
        out.print("No findings: nothing to do.", highlight=False)
    if report.unattributed:
        names = ", ".join(f"{name} {us:.1f}" for name, us in report.unattributed[:5])
        out.print(f"Unattributed (µs per step): {names}", highlight=False)
    file = out.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
