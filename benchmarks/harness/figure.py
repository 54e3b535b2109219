"""What the pictures of runs share: matplotlib or a clear error, and files that stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastlinear.core.errors import UnsupportedError

T = TypeVar("T")


@contextmanager
def written(
    path: Path,
    size: tuple[float, float],
    *,
    function: str = "bench.plot",
    font: int = 8,
    dpi: int = 150,
    palette: int | None = None,
) -> Iterator[Any]:
    """A figure of so many inches to draw on, written to ``path`` behind the block.

    ``palette`` is how many colours a ``.png`` may have, which makes it a third as large.

    Raises:
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            function,
            "matplotlib",
            str(error),
            "Install the extra: pip install 'fastlinear[plots]'.",
        ) from error
    settings: dict[Any, Any] = {"svg.hashsalt": "fastlinear", "font.size": font}
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=dpi, metadata=metadata)
    if palette is not None and path.suffix.lower() == ".png":
        from PIL import Image  # matplotlib brings it

        with Image.open(path) as image:
            few = image.convert("RGB").quantize(palette, kmeans=3)
        few.save(path, optimize=True)


def legend(figure: Any, axes: Iterable[Any], columns: int) -> None:
    """One legend above all panels, each label once."""
    marks = {
        label: handle
        for ax in axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(marks.values(), marks.keys(), loc="outside upper center", ncols=columns)


def curves_in_panels(
    path: Path,
    found: Sequence[T],
    draw: Callable[[Any, T], None],
    *,
    dpi: int = 150,
    palette: int | None = None,
) -> None:
    """Draw each of ``found`` in a panel of its own, two beside each other, and write the file."""
    lines = -(-len(found) // 2)
    with written(path, (11, 0.9 + 3.1 * lines), dpi=dpi, palette=palette) as figure:
        axes = figure.subplots(lines, 2, squeeze=False).flatten()
        for ax, one in zip(axes, found, strict=False):
            draw(ax, one)
        for ax in axes[len(found) :]:
            ax.set_axis_off()
        legend(figure, axes, columns=6)
