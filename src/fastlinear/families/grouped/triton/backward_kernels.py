"""Triton kernels of grouped_linear's backward.

How strides are given, and what a tile is, stands in tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation_grad
from fastlinear.families.grouped.triton.tiles import (
    _dot,
    _load,
    _load_matrix,
    _load_signs,
    _mask,
    _place,
    _stride,
)


@triton.jit
def _backward_kernel(
    dy_ptr,
    saved_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    B,
    L,
    batch_tiles,
    tiles,
    room,
    program_tiles,
    col_tiles,
    G,
    dy_batch,
    dy_row,
    dy_group,
    dy_col,
    s_batch,
    s_row,
    s_group,
    s_col,
    x_batch,
    x_row,
    x_group,
    x_col,
    w_group,
    w_row,
    w_col,
    dx_batch,
    dx_row,
    dx_group,
    dx_col,
    DY_ALIGN: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FIXED: tl.constexpr,
    S_ALIGN: tl.constexpr,
    S_UNIT: tl.constexpr,
    S_FIXED: tl.constexpr,
    X_ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr,
    X_FIXED: tl.constexpr,
    W_ALIGN: tl.constexpr,
    W_UNIT: tl.constexpr,
    W_FIXED: tl.constexpr,
    DX_ALIGN: tl.constexpr,
    DX_UNIT: tl.constexpr,
    DX_FIXED: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    DX_PRECISION: tl.constexpr,
    DW_PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dx, and this program's shares of dW and db, of program_tiles tiles of the groups' in a row.

    Tiles are counted through all groups, ``room`` to each, of which ``tiles`` exist; a program has
    those of one group only unless SHARED. It takes BLOCK_K of the K columns of x, dx and dW_g,
    whose part stays in registers, and all N <= BLOCK_N of dy; programs of other columns of the same
    tiles run side by side and share dy's reads. Of group g's programs the c-th writes (c, g) of dw
    (chunks, G, N, K) and db (chunks, G, N), which hold float32, or the results themselves where
    each group has one program. ``saved_ptr`` is None for "none", and leads to bytes where it is
    signs; ``dx_ptr``, ``dw_ptr`` (then ``x_ptr`` as well) and ``db_ptr`` where not wanted.
    """
    k0 = (tl.program_id(0) % col_tiles) * BLOCK_K
    n = tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    dy_n = _stride(dy_col, DY_ALIGN, DY_UNIT == "col")
    SIGNS: tl.constexpr = saved_ptr is not None and saved_ptr.dtype.element_ty == tl.uint8
    # where registers form dpre, one copy of it serves both products as the second operand
    TURNED: tl.constexpr = SIGNS and BLOCK_K >= 64
    if saved_ptr is not None:
        s_n = _stride(s_col, S_ALIGN, S_UNIT == "col")
    if dx_ptr is not None:
        w_n = _stride(w_row, W_ALIGN, W_UNIT == "row")
        w_k = _stride(w_col, W_ALIGN, W_UNIT == "col")
        dx_cols = k * _stride(dx_col, DX_ALIGN, DX_UNIT == "col")
    if dw_ptr is not None:
        x_k = _stride(x_col, X_ALIGN, X_UNIT == "col")
    if db_ptr is not None:
        # 16-bit numbers in memory are summed by the matrix units: 16 equal rows take few registers
        FLOATS: tl.constexpr = dy_ptr.dtype.element_ty == tl.float32
        ONE: tl.constexpr = TURNED or (SIGNS and FLOATS)
        LANES: tl.constexpr = ONE or FLOATS
        ROWS: tl.constexpr = 1 if ONE else BLOCK_M if LANES else 16
        ones = tl.full((16, BLOCK_M), 1.0, dtype=tl.float32).to(dy_ptr.dtype.element_ty)

    program = tl.program_id(0) // col_tiles
    begin = program * program_tiles
    end = tl.minimum(begin + program_tiles, room * G)
    groups = (end - 1) // room - begin // room + 1 if SHARED else 1
    for i in tl.range(0, groups, disable_licm=True):
        group = begin // room + i
        g = tl.cast(group, tl.int64)
        dy_base = dy_ptr + g * (dy_group * DY_ALIGN)
        if saved_ptr is not None:
            s_base = saved_ptr + g * (s_group * S_ALIGN)
        if dx_ptr is not None:
            w_base = w_ptr + g * (w_group * W_ALIGN)
            if TURNED:
                w = _load_matrix(w_base, w_k, w_n, k0, 0, K, N, BLOCK_K, BLOCK_N)
            else:
                w = _load_matrix(w_base, w_n, w_k, 0, k0, N, K, BLOCK_N, BLOCK_K)
            dx_base = dx_ptr + g * (dx_group * DX_ALIGN)
        if dw_ptr is not None:
            x_base = x_ptr + g * (x_group * X_ALIGN)
            dw = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)  # dWᵀ: so loads of dy stay ahead
        if db_ptr is not None:
            sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)

        first_tile = tl.maximum(begin - group * room, 0)
        last_tile = tl.minimum(end - group * room, tiles)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            mask = _mask(tile, B, L, batch_tiles, BLOCK_M, ACROSS)
            first, rows = _place(
                tile, L, batch_tiles, dy_batch, dy_row, DY_ALIGN, DY_UNIT, DY_FIXED, BLOCK_M, ACROSS
            )
            dpre = _load(dy_base + first, rows, mask, dy_n, 0, N, BLOCK_N)
            if saved_ptr is not None:
                first, rows = _place(
                    tile, L, batch_tiles, s_batch, s_row, S_ALIGN, S_UNIT, S_FIXED, BLOCK_M, ACROSS
                )
                if SIGNS:
                    positive = _load_signs(s_base + first, rows, mask, s_n, N, BLOCK_M, BLOCK_N)
                    rest = activation_grad(dpre.to(tl.float32), 0.0, ACTIVATION, MATH)
                    dpre = tl.where(positive, dpre, rest.to(dy_ptr.dtype.element_ty))
                else:
                    saved = _load(s_base + first, rows, mask, s_n, 0, N, BLOCK_N).to(tl.float32)
                    grad = activation_grad(dpre.to(tl.float32), saved, ACTIVATION, MATH)
                    dpre = grad.to(dy_ptr.dtype.element_ty)
            if db_ptr is not None:
                if ONE:
                    sums += tl.sum(dpre.to(tl.float32), axis=0)[None, :]
                elif LANES:
                    sums += dpre
                else:
                    sums = _dot(ones, dpre, sums, DX_PRECISION, UPCAST)
            if dw_ptr is not None:
                first, rows = _place(
                    tile, L, batch_tiles, x_batch, x_row, X_ALIGN, X_UNIT, X_FIXED, BLOCK_M, ACROSS
                )
                x_ptrs = x_base + first + rows[:, None] + (k * x_k)[None, :]
                x = tl.load(x_ptrs, mask=mask[:, None] & (k < K)[None, :], other=0.0)
                dw = _dot(tl.trans(x), dpre, dw, DW_PRECISION, UPCAST)
            if dx_ptr is not None:
                if TURNED:
                    dx = tl.zeros((BLOCK_K, BLOCK_M), dtype=tl.float32)
                    dx = tl.trans(_dot(w, tl.trans(dpre), dx, DX_PRECISION, UPCAST))
                else:
                    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
                    dx = _dot(dpre, w, dx, DX_PRECISION, UPCAST)
                first, rows = _place(
                    tile,
                    L,
                    batch_tiles,
                    dx_batch,
                    dx_row,
                    DX_ALIGN,
                    DX_UNIT,
                    DX_FIXED,
                    BLOCK_M,
                    ACROSS,
                )
                ptrs = dx_base + first + rows[:, None] + dx_cols[None, :]
                out = dx.to(dx_ptr.dtype.element_ty)
                tl.store(ptrs, out, mask=mask[:, None] & (k < K)[None, :])

        chunk = program - group * room // program_tiles
        part = chunk.to(tl.int64) * G + g
        if dw_ptr is not None:
            ptrs = dw_ptr + part * (N * K) + n[:, None] * K + k[None, :]
            out = tl.trans(dw).to(dw_ptr.dtype.element_ty)
            tl.store(ptrs, out, mask=(n < N)[:, None] & (k < K)[None, :])
        if db_ptr is not None:  # noqa: SIM102 - known when compiling, the next is not
            if k0 == 0:
                db = tl.sum(sums, axis=0)
                if not LANES:
                    db = db * 0.0625
                tl.store(db_ptr + part * N + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _grad_pre_kernel(
    dy_ptr,
    saved_ptr,
    dpre_ptr,
    db_ptr,
    B,
    L,
    batch_tiles,
    tiles,
    program_tiles,
    col_tiles,
    G,
    dy_batch,
    dy_row,
    dy_group,
    dy_col,
    s_batch,
    s_row,
    s_group,
    s_col,
    d_batch,
    d_row,
    d_group,
    d_col,
    DY_ALIGN: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FIXED: tl.constexpr,
    S_ALIGN: tl.constexpr,
    S_UNIT: tl.constexpr,
    S_FIXED: tl.constexpr,
    D_ALIGN: tl.constexpr,
    D_UNIT: tl.constexpr,
    D_FIXED: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """dpre = dy act'(pre) and shares of db on program_tiles tiles of one group, BLOCK_N columns.

    ``saved_ptr`` and ``dpre_ptr`` are None for "none", where dpre is dy; ``db_ptr`` (chunks, G, N),
    as in ``_backward_kernel``, where db is not wanted.
    """
    g = (tl.program_id(0) // col_tiles).to(tl.int64)
    n = (tl.program_id(0) % col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    chunk = tl.program_id(1)
    dy_cols = n * _stride(dy_col, DY_ALIGN, DY_UNIT == "col")
    s_cols = n * _stride(s_col, S_ALIGN, S_UNIT == "col")
    d_cols = n * _stride(d_col, D_ALIGN, D_UNIT == "col")
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = chunk * program_tiles
    for tile in range(begin, tl.minimum(begin + program_tiles, tiles)):
        row_mask = _mask(tile, B, L, batch_tiles, BLOCK_M, ACROSS)
        mask = row_mask[:, None] & n_mask[None, :]
        first, rows = _place(
            tile, L, batch_tiles, dy_batch, dy_row, DY_ALIGN, DY_UNIT, DY_FIXED, BLOCK_M, ACROSS
        )
        dy_ptrs = dy_ptr + g * (dy_group * DY_ALIGN) + first + rows[:, None] + dy_cols[None, :]
        grad = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
        if saved_ptr is not None:
            first, rows = _place(
                tile, L, batch_tiles, s_batch, s_row, S_ALIGN, S_UNIT, S_FIXED, BLOCK_M, ACROSS
            )
            s_ptrs = saved_ptr + g * (s_group * S_ALIGN) + first + rows[:, None] + s_cols[None, :]
            saved = tl.load(s_ptrs, mask=mask, other=0.0).to(tl.float32)
            grad = activation_grad(grad, saved, ACTIVATION, MATH)
        if dpre_ptr is not None:
            first, rows = _place(
                tile, L, batch_tiles, d_batch, d_row, D_ALIGN, D_UNIT, D_FIXED, BLOCK_M, ACROSS
            )
            d_ptrs = dpre_ptr + g * (d_group * D_ALIGN) + first + rows[:, None] + d_cols[None, :]
            tl.store(d_ptrs, grad.to(dpre_ptr.dtype.element_ty), mask=mask)
        sums += grad
    if db_ptr is not None:
        db = tl.sum(sums, axis=0).to(db_ptr.dtype.element_ty)
        tl.store(db_ptr + (chunk.to(tl.int64) * G + g) * N + n, db, mask=n_mask)


@triton.jit
def _grad_weight_kernel(
    d_ptr,
    x_ptr,
    dw_ptr,
    B,
    L,
    batch_tiles,
    tiles,
    program_tiles,
    col_tiles,
    G,
    d_batch,
    d_row,
    d_group,
    d_col,
    x_batch,
    x_row,
    x_group,
    x_col,
    D_ALIGN: tl.constexpr,
    D_UNIT: tl.constexpr,
    D_FIXED: tl.constexpr,
    X_ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr,
    X_FIXED: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile (BLOCK_N, BLOCK_K) of dW_g = dpre_gᵀ x_g over program_tiles tiles of tokens.

    Program axes: the tile of dW, the group, the chunk of tokens; ``dw_ptr`` as in
    ``_backward_kernel``.
    """
    n = (tl.program_id(0) // col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % col_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    g = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(2)
    n_mask = n < N
    k_mask = k < K
    d_cols = n * _stride(d_col, D_ALIGN, D_UNIT == "col")
    x_cols = k * _stride(x_col, X_ALIGN, X_UNIT == "col")
    d_base = d_ptr + g * (d_group * D_ALIGN)
    x_base = x_ptr + g * (x_group * X_ALIGN)
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    begin = chunk * program_tiles
    for tile in range(begin, tl.minimum(begin + program_tiles, tiles)):
        mask = _mask(tile, B, L, batch_tiles, BLOCK_M, ACROSS)
        first, rows = _place(
            tile, L, batch_tiles, d_batch, d_row, D_ALIGN, D_UNIT, D_FIXED, BLOCK_M, ACROSS
        )
        d_ptrs = d_base + first + rows[:, None] + d_cols[None, :]
        d = tl.load(d_ptrs, mask=mask[:, None] & n_mask[None, :], other=0.0)
        first, rows = _place(
            tile, L, batch_tiles, x_batch, x_row, X_ALIGN, X_UNIT, X_FIXED, BLOCK_M, ACROSS
        )
        x_ptrs = x_base + first + rows[:, None] + x_cols[None, :]
        x = tl.load(x_ptrs, mask=mask[:, None] & k_mask[None, :], other=0.0)
        dw = _dot(tl.trans(d), x, dw, PRECISION, UPCAST)
    ptrs = dw_ptr + ((chunk.to(tl.int64) * G + g) * N + n[:, None]) * K + k[None, :]
    tl.store(ptrs, dw.to(dw_ptr.dtype.element_ty), mask=n_mask[:, None] & k_mask[None, :])


@triton.jit
def _sum_chunks_kernel(
    dw_part_ptr,
    db_part_ptr,
    dw_ptr,
    db_ptr,
    G,
    dw_blocks,
    room,
    program_tiles,
    DW_SIZE: tl.constexpr,
    DB_SIZE: tl.constexpr,
    DW_BLOCK: tl.constexpr,
    DB_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program adds up to DW_BLOCK numbers of all chunks of one group's dW, or from program
    dw_blocks on DB_BLOCK of its db, in order.

    A group has DW_SIZE and DB_SIZE numbers, and up to CHUNKS programs that took its tiles, as in
    ``_backward_kernel``. A pair of pointers may be None.
    """
    program = tl.program_id(0)
    if dw_ptr is not None:  # noqa: SIM102 - known when compiling, the next is not
        if program < dw_blocks:
            _add_chunks(
                dw_part_ptr, dw_ptr, program, G, room, program_tiles, DW_SIZE, DW_BLOCK, CHUNKS
            )
    if db_ptr is not None:  # noqa: SIM102
        if program >= dw_blocks:
            program -= dw_blocks
            _add_chunks(
                db_part_ptr, db_ptr, program, G, room, program_tiles, DB_SIZE, DB_BLOCK, CHUNKS
            )


@triton.jit
def _add_chunks(
    part_ptr,
    out_ptr,
    program,
    G,
    room,
    program_tiles,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    group = program // BLOCKS
    chunks = ((group + 1) * room - 1) // program_tiles - group * room // program_tiles + 1
    place = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    ptrs = part_ptr + (group.to(tl.int64) * SIZE + place)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    size = tl.cast(G, tl.int64) * SIZE
    AT_ONCE: tl.constexpr = min(CHUNKS, 4)  # that many loads are under way
    for first in range(0, CHUNKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            chunk_ptrs = ptrs + (first + i) * size
            acc += tl.load(chunk_ptrs, mask=mask & (first + i < chunks), other=0.0)
    out_ptrs = out_ptr + (group.to(tl.int64) * SIZE + place)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
