"""Triton kernels of linear_act for few rows of x, where launches and reading W once decide.

All accumulate in float32 and are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad


@triton.jit
def _few_rows_forward_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    pre_ptr,
    N,
    K,
    x_row_stride,
    x_col_stride,
    w_row_stride,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program computes y = act(x Wᵀ + b) for all ROWS rows and BLOCK_N outputs.

    x (ROWS, K) has any strides, w (N, K) unit stride along K; ``bias_ptr`` (N,) and ``pre_ptr``
    (ROWS, N) may be None. Products are float32 multiply-adds: each element of W is read once and
    goes straight to the registers of the thread that sums it. EVEN_K: K is a multiple of BLOCK_K.
    """
    n_offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_offs < N
    # Rows past the end wrap to valid memory; they are masked when stored.
    w_ptrs = w_ptr + (n_offs % N).to(tl.int64)[:, None] * w_row_stride
    k_offs = tl.arange(0, BLOCK_K)[None, :]
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32),)  # type: ignore[assignment]
    for k in range(0, K, BLOCK_K):
        cols = (k_offs + k).to(tl.int64)
        if EVEN_K:
            w = tl.load(w_ptrs + cols).to(tl.float32)
        else:
            w = tl.load(w_ptrs + cols, mask=cols < K, other=0.0).to(tl.float32)
        new = ()
        for m in tl.static_range(ROWS):
            x_ptrs = x_ptr + tl.full((), m, tl.int64) * x_row_stride + cols * x_col_stride
            if EVEN_K:
                x = tl.load(x_ptrs)
            else:
                x = tl.load(x_ptrs, mask=cols < K, other=0.0)
            new = new + (sums[m] + w * x.to(tl.float32),)  # type: ignore[assignment]
        sums = new
    for m in tl.static_range(ROWS):
        pre = tl.sum(sums[m], axis=1)
        if bias_ptr is not None:
            pre += tl.load(bias_ptr + n_offs, mask=n_mask, other=0.0).to(tl.float32)
        y_offs = tl.full((), m, tl.int64) * N + n_offs
        if pre_ptr is not None:
            tl.store(pre_ptr + y_offs, pre.to(pre_ptr.dtype.element_ty), mask=n_mask)
        y = activation(pre, ACTIVATION, MATH)
        tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def _dpre(
    dy_ptrs,
    saved_ptrs,
    mask,
    HAS_SAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    EVEN: tl.constexpr = False,
):
    """dy * act'(pre) in float32, or dy as it is where nothing was saved; 0 outside the mask.

    EVEN: the mask covers everything, and is not looked at.
    """
    if EVEN:
        grad = tl.load(dy_ptrs)
    else:
        grad = tl.load(dy_ptrs, mask=mask, other=0.0)
    if HAS_SAVED:
        grad = grad.to(tl.float32)
        if EVEN:
            saved = tl.load(saved_ptrs).to(tl.float32)
        else:
            saved = tl.load(saved_ptrs, mask=mask, other=0.0).to(tl.float32)
        grad = activation_grad(grad, saved, ACTIVATION, MATH)
        if not EVEN:
            grad = tl.where(mask, grad, 0.0)
    return grad


@triton.jit
def _few_rows_backward_kernel(
    dy_ptr,
    saved_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    x_row_stride,
    x_col_stride,
    w_row_stride,
    w_col_stride,
    slice_n,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program walks slice_n rows of W on BLOCK_K columns: their share of dx, and their dW.

    Program axis 0 is the strip of columns, axis 1 the slice of N. dy and saved are (ROWS, N), the
    latter with unit stride along N, or None; x (ROWS, K) and w (N, K) have any strides; dw (N, K)
    and db (N,) are contiguous. Slice s writes rows [s * ROWS, (s + 1) * ROWS) of dx (slices * ROWS,
    K), float32 where there are several. Each of ``dx_ptr``, ``dw_ptr`` and ``db_ptr`` may be None.
    Float32 multiply-adds; dpre is rounded to the dtype of dy before the products.
    """
    strip = tl.program_id(0)
    piece = tl.program_id(1)
    cols = (strip * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    col_mask = cols < K
    cols64 = cols.to(tl.int64)
    n_begin = piece * slice_n
    n_end = tl.minimum(n_begin + slice_n, N)
    sums = ()
    xs = ()
    for m in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32),)  # type: ignore[assignment]
        if dw_ptr is not None:
            x_ptrs = x_ptr + tl.full((), m, tl.int64) * x_row_stride + cols64 * x_col_stride
            xs = xs + (tl.load(x_ptrs, mask=col_mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for n in tl.range(n_begin, n_end, BLOCK_N, num_stages=STAGES):
        rows = (n + tl.arange(0, BLOCK_N))[:, None]
        row_mask = rows < n_end
        mask = row_mask & col_mask
        rows64 = rows.to(tl.int64)
        if dx_ptr is not None:
            w_ptrs = w_ptr + rows64 * w_row_stride + cols64 * w_col_stride
            w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
        dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        db = tl.zeros((BLOCK_N, 1), dtype=tl.float32)
        new = ()
        for m in tl.static_range(ROWS):
            row = tl.full((), m, tl.int64)
            dy_ptrs = dy_ptr + row * dy_row_stride + rows64 * dy_col_stride
            saved_ptrs = dy_ptrs
            if saved_ptr is not None:
                saved_ptrs = saved_ptr + row * saved_row_stride + rows64
            grad = _dpre(dy_ptrs, saved_ptrs, row_mask, saved_ptr is not None, ACTIVATION, MATH)
            grad = grad.to(tl.float32)
            db += grad
            grad = grad.to(dy_ptr.dtype.element_ty).to(tl.float32)
            if dw_ptr is not None:
                dw += grad * xs[m]
            if dx_ptr is not None:
                new = new + (sums[m] + grad * w,)  # type: ignore[assignment]
        if dx_ptr is not None:
            sums = new
        if dw_ptr is not None:
            tl.store(dw_ptr + rows64 * K + cols64, dw.to(dw_ptr.dtype.element_ty), mask=mask)
        if db_ptr is not None:
            tl.store(db_ptr + rows, db.to(db_ptr.dtype.element_ty), mask=row_mask & (strip == 0))
    if dx_ptr is not None:
        out_cols = strip * BLOCK_K + tl.arange(0, BLOCK_K)
        for m in tl.static_range(ROWS):
            dx = tl.sum(sums[m], axis=0)
            offs = (piece * ROWS + m).to(tl.int64) * K + out_cols
            tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=out_cols < K)


@triton.jit
def _dx_tile(
    dy_ptr,
    saved_ptr,
    w_ptr,
    dx_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    w_row_stride,
    w_col_stride,
    strip,
    piece,
    slice_n,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dx on BLOCK_K columns, summed over the slice ``piece`` of N."""
    rows = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    row_mask = rows < M
    cols = (strip * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    col_mask = cols < K
    w_cols = w_ptr + cols.to(tl.int64) * w_col_stride
    n_begin = piece * slice_n
    n_end = tl.minimum(n_begin + slice_n, N)
    acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for n in range(n_begin, n_end, BLOCK_N):
        n_offs = n + tl.arange(0, BLOCK_N)
        n_mask = n_offs < n_end
        n64 = n_offs.to(tl.int64)
        dy_ptrs = dy_ptr + rows * dy_row_stride + n64[None, :] * dy_col_stride
        saved_ptrs = dy_ptrs
        if saved_ptr is not None:
            saved_ptrs = saved_ptr + rows * saved_row_stride + n64[None, :]
        mask = row_mask & n_mask[None, :]
        grad = _dpre(dy_ptrs, saved_ptrs, mask, saved_ptr is not None, ACTIVATION, MATH)
        grad = grad.to(dy_ptr.dtype.element_ty)
        w_mask = n_mask[:, None] & col_mask
        w = tl.load(w_cols + n64[:, None] * w_row_stride, mask=w_mask, other=0.0)
        if UPCAST:
            acc = tl.dot(grad.to(tl.float32), w.to(tl.float32), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(grad, w, acc, input_precision=PRECISION)
    offs = (piece.to(tl.int64) * M + rows) * K + cols
    tl.store(dx_ptr + offs, acc.to(dx_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit
def _dw_tile(
    dy_ptr,
    saved_ptr,
    x_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    x_row_stride,
    x_col_stride,
    tile,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One (BLOCK_N, BLOCK_K) tile of dW, and BLOCK_N elements of db in the first column of tiles.

    Without dW there is one column of tiles.
    """
    col_tiles = 1 if dw_ptr is None else tl.cdiv(K, BLOCK_K)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    row_mask = rows < M
    n_offs = tile // col_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_offs < N
    n64 = n_offs.to(tl.int64)
    dy_ptrs = dy_ptr + rows * dy_row_stride + n64[None, :] * dy_col_stride
    saved_ptrs = dy_ptrs
    if saved_ptr is not None:
        saved_ptrs = saved_ptr + rows * saved_row_stride + n64[None, :]
    mask = row_mask & n_mask[None, :]
    grad = _dpre(dy_ptrs, saved_ptrs, mask, saved_ptr is not None, ACTIVATION, MATH)
    grad = grad.to(tl.float32)
    if db_ptr is not None:  # noqa: SIM102 - known when compiling, unlike the next condition
        if tile % col_tiles == 0:
            db = tl.sum(grad, axis=0)
            tl.store(db_ptr + n_offs, db.to(db_ptr.dtype.element_ty), mask=n_mask)
    if dw_ptr is not None:
        cols = (tile % col_tiles * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        col_mask = cols < K
        x_ptrs = x_ptr + rows * x_row_stride + cols.to(tl.int64) * x_col_stride
        x = tl.load(x_ptrs, mask=row_mask & col_mask, other=0.0)
        grad = grad.to(dy_ptr.dtype.element_ty)
        if UPCAST:
            grad = grad.to(tl.float32)
            x = x.to(tl.float32)
        dw = tl.dot(tl.trans(grad), x, input_precision=PRECISION)
        offs = n64[:, None] * K + cols
        tl.store(dw_ptr + offs, dw.to(dw_ptr.dtype.element_ty), mask=n_mask[:, None] & col_mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    saved_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    x_row_stride,
    x_col_stride,
    w_row_stride,
    w_col_stride,
    dx_programs,
    slice_n,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    DX_PRECISION: tl.constexpr,
    DW_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DX_K: tl.constexpr,
    DX_N: tl.constexpr,
    DW_K: tl.constexpr,
    DW_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Programs below dx_programs compute dx on DX_K columns over a slice of N, the others one
    (DW_N, DW_K) tile of dW. Both form dpre as they go; the first column of tiles gives db.

    All M rows lie in one block: M <= BLOCK_M. Layouts and slices as in
    ``_few_rows_backward_kernel``. UPCAST multiplies in float32 (the CPU interpreter has no
    bfloat16).
    """
    pid = tl.program_id(0)
    if pid < dx_programs:
        if dx_ptr is not None:
            strips = tl.cdiv(K, DX_K)
            _dx_tile(
                dy_ptr,
                saved_ptr,
                w_ptr,
                dx_ptr,
                M,
                N,
                K,
                dy_row_stride,
                dy_col_stride,
                saved_row_stride,
                w_row_stride,
                w_col_stride,
                pid % strips,
                pid // strips,
                slice_n,
                ACTIVATION,
                MATH,
                DX_PRECISION,
                BLOCK_M,
                DX_K,
                DX_N,
                UPCAST,
            )
    else:
        _dw_tile(
            dy_ptr,
            saved_ptr,
            x_ptr,
            dw_ptr,
            db_ptr,
            M,
            N,
            K,
            dy_row_stride,
            dy_col_stride,
            saved_row_stride,
            x_row_stride,
            x_col_stride,
            pid - dx_programs,
            ACTIVATION,
            MATH,
            DW_PRECISION,
            BLOCK_M,
            DW_K,
            DW_N,
            UPCAST,
        )
