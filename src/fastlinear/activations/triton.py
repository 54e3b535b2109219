"""Triton device functions: every activation and its derivative, chosen at compile time.

All of them take and return float32 tensors of any shape. A tensor stands before a named constant:
under Triton 3.9's interpreter a constant times a tensor is no tensor. ``MATH`` picks how
transcendental functions are evaluated:

- ``"exact"``: float32-accurate; for float32 results.
- ``"fast"``: one or two ``exp2`` and at most one division per element; for 16-bit results.

The ``tanh.approx`` instruction is not used: x (1 + tanh u) / 2 cancels where u is far below 0, and
its error of 2^-11 is then larger than the result.
"""

# ruff: noqa: RET505 - Triton goes on compiling after a taken compile-time branch, so every choice
# must be an if/elif/else chain.
from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)
_QUICK_GELU = tl.constexpr(1.702)
_FAR = tl.constexpr(64.0)  # beyond which no float32 mass is left
_LEAKY_SLOPE = tl.constexpr(0.01)
_NEAR = tl.constexpr(8192.0)  # up to which a quarter turn's parts have few enough bits


@triton.jit
def _exp(x, MATH: tl.constexpr):
    """exp(x). Exact: reduced by multiples of ln 2 in two parts, so that rounding x / ln 2 does not
    show, then a Taylor polynomial of degree 7 on |r| < 0.35 (remainder 5e-9)."""
    if MATH == "exact":
        x = tl.where(x < -104.0, -104.0, tl.where(x > 104.0, 104.0, x))
        n = tl.floor(x * _LOG2E + 0.5)
        r = (x - n * 0.693359375) + n * 2.12194440e-4
        p = r * (1.0 / 5040.0) + 1.0 / 720.0
        p = p * r + 1.0 / 120.0
        p = p * r + 1.0 / 24.0
        p = p * r + 1.0 / 6.0
        p = p * r + 0.5
        p = p * r + 1.0
        p = p * r + 1.0
        return p * tl.exp2(n)
    else:
        return tl.exp2(x * _LOG2E)


@triton.jit
def _tanh(x, MATH: tl.constexpr):
    """tanh(x): a Taylor polynomial below 0.5, where the quotient would cancel."""
    s = x * x
    p = -929569.0 / 638512875.0
    p = p * s + 21844.0 / 6081075.0
    p = p * s - 1382.0 / 155925.0
    p = p * s + 62.0 / 2835.0
    p = p * s - 17.0 / 315.0
    p = p * s + 2.0 / 15.0
    p = p * s - 1.0 / 3.0
    return tl.where(tl.abs(x) < 0.5, x + x * s * p, _tanh_quotient(x, MATH))


@triton.jit
def _tanh_quotient(x, MATH: tl.constexpr):
    """tanh(x) = 1 - 2e / (1 + e), e = exp(-2|x|): exact near 1, relatively inaccurate near 0."""
    e = _exp(-2.0 * tl.abs(x), MATH)
    q = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(x < 0, -q, q)


@triton.jit
def _sigmoid(half_x, MATH: tl.constexpr):
    """1 / (1 + exp(-2 half_x))."""
    return 1.0 / (1.0 + _exp(-2.0 * half_x, MATH))


@triton.jit
def _normal_tail(a, MATH: tl.constexpr):
    """The mass of the standard normal distribution beyond a >= 0, as 2 to a polynomial in a.

    Its logarithm is smooth, so that one exponential does. Fitted for the least largest error:
    relative 2e-8 up to 6.5 (exact), 4e-6 up to 6 (fast); it falls on to 0 from there.
    """
    if MATH == "exact":
        p = -1.9120668e-10 * a + 8.90491476e-09
        p = p * a - 1.86933133e-07
        p = p * a + 2.33099693e-06
        p = p * a - 1.90285861e-05
        p = p * a + 0.000103522231
        p = p * a - 0.000335358761
        p = p * a + 6.75572968e-05
        p = p * a + 0.00690312235
        p = p * a - 0.0524297883
        p = p * a - 0.459220435
        p = p * a - 1.15110455
    else:
        p = -1.79381584e-06 * a + 6.07268634e-05
        p = p * a - 0.000923191132
        p = p * a + 0.0084768674
        p = p * a - 0.0538909755
        p = p * a - 0.458541554
        p = p * a - 1.15121438
    return tl.exp2(p * a - 1.0)


@triton.jit
def _softplus(x, MATH: tl.constexpr):
    """log(1 + exp(x)) = max(x, 0) + log(1 + u), u = exp(-|x|), by 2 atanh(u / (2 + u))."""
    u = _exp(-tl.abs(x), MATH)
    s = u / (2.0 + u)
    z = s * s
    p = (2.0 / 15.0) * z + 2.0 / 13.0
    p = p * z + 2.0 / 11.0
    p = p * z + 2.0 / 9.0
    p = p * z + 2.0 / 7.0
    p = p * z + 2.0 / 5.0
    p = p * z + 2.0 / 3.0
    return tl.where(x < 0, 0.0, x) + (2.0 * s + s * z * p)


@triton.jit
def _one_less_exp(y, MATH: tl.constexpr):
    """1 - exp(-y) of y >= 0: a Taylor polynomial below 0.5, where the difference would cancel."""
    p = 1.0 - y * (1.0 / 8.0)
    p = 1.0 - y * (1.0 / 7.0) * p
    p = 1.0 - y * (1.0 / 6.0) * p
    p = 1.0 - y * (1.0 / 5.0) * p
    p = 1.0 - y * (1.0 / 4.0) * p
    p = 1.0 - y * (1.0 / 3.0) * p
    p = 1.0 - y * (1.0 / 2.0) * p
    return tl.where(y < 0.5, y * p, 1.0 - _exp(-y, MATH))


@triton.jit
def _mish_parts(x, MATH: tl.constexpr):
    """(e, p), e = exp(x) of x up to 40, p = e (e + 2): tanh(softplus(x)) = p / (p + 2)."""
    e = _exp(tl.minimum(x, 40.0), MATH)
    return e, e * (e + 2.0)


@triton.jit
def _sine(x, QUARTERS: tl.constexpr):
    """sin(x + QUARTERS pi / 2). Exact: up to 8192 the nearest quarter turn is taken away in four
    parts, of which the products with its number are exact; beyond, see ``_quarters``."""
    n = tl.floor(x * 0.6366197723675814 + 0.5)
    r = ((x - n * 1.5703125) - n * 4.837512969970703125e-4) - n * 7.54953362047672271729e-8
    r = r - n * 2.56334406825708960298e-12
    quarter = n.to(tl.int32)
    far = ~(tl.abs(x) <= _NEAR)
    if tl.max(far.to(tl.int32)) > 0:
        far_r, far_quarter = _quarters(x)
        r = tl.where(far, far_r, r)
        quarter = tl.where(far, far_quarter, quarter)
    quarter += QUARTERS
    s = r * r
    cosine = ((2.44677067e-5 * s - 1.38877297e-3) * s + 4.16666567e-2) * s - 0.5
    sine = ((2.86567956e-6 * s - 1.98559923e-4) * s + 8.33338592e-3) * s - 1.66666672e-1
    y = tl.where((quarter & 1) != 0, cosine * s + 1.0, sine * s * r + r)
    return tl.where((quarter & 2) != 0, -y, y)


@triton.jit
def _quarters(x):
    """(r, n): x = n quarter turns + r of any |x| >= 1, n up to a multiple of 4. The 96 bits of
    2 / pi that matter to x are multiplied by its 24; NaN where x is not finite."""
    bits = x.to(tl.uint32, bitcast=True)
    m = (bits << 8) | 0x80000000
    power = ((bits >> 23) & 255) - 126
    index, shift = power >> 5, power & 31
    none = tl.zeros_like(m)
    first = _pick(index, none, 0x28BE60DB, 0x9391054A, 0x7F09D5F4, 0x7D4D3770)
    second = _pick(index, none + 0x28BE60DB, 0x9391054A, 0x7F09D5F4, 0x7D4D3770, 0x36D8A566)
    third = _pick(index, none + 0x9391054A, 0x7F09D5F4, 0x7D4D3770, 0x36D8A566, 0x4F10E410)
    fourth = _pick(index, none + 0x7F09D5F4, 0x7D4D3770, 0x36D8A566, 0x4F10E410, 0x7F9458EA)
    first = (first << shift) | ((second >> 1) >> (31 - shift))
    second = (second << shift) | ((third >> 1) >> (31 - shift))
    third = (third << shift) | ((fourth >> 1) >> (31 - shift))
    low = m * second
    sum = low + tl.umulhi(m, third)
    turns = m * first + tl.umulhi(m, second) + (sum < low).to(tl.uint32)  # in quarters of 2^30
    quarter = ((turns + 0x20000000) >> 30).to(tl.int32)
    part = ((turns << 2) | (sum >> 30)).to(tl.int32, bitcast=True).to(tl.float32)
    r = (part + (sum << 2).to(tl.float32) * 2.3283064365386963e-10) * 3.6572951981250744e-10
    r = tl.where(tl.abs(x) < float("inf"), r, x - x)
    return tl.where(x < 0, -r, r), tl.where(x < 0, -quarter, quarter)


@triton.jit
def _pick(index, first, b, c, d, e):
    """first, b, c, d or e for index 0 to 4."""
    found = tl.where(index == 1, b, first)
    found = tl.where(index == 2, c, found)
    found = tl.where(index == 3, d, found)
    return tl.where(index == 4, e, found)


@triton.jit
def activation(x, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """act(x) for float32 ``x``; NaN stays NaN."""
    if ACTIVATION == "none":
        return x
    elif ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        r = tl.where(x < 0, 0.0, x)
        return r * r
    elif ACTIVATION == "leaky_relu":
        return tl.where(x < 0, x * _LEAKY_SLOPE, x)
    elif ACTIVATION == "sigmoid":
        return _sigmoid(0.5 * x, MATH)
    elif ACTIVATION == "tanh":
        return _tanh(x, MATH)
    elif ACTIVATION == "silu":
        return _times_sigmoid(x, 0.5 * x, MATH)
    elif ACTIVATION == "quick_gelu":
        return _times_sigmoid(x, x * (0.5 * _QUICK_GELU), MATH)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 x (1 + tanh u) = x sigmoid(2u)
        u = x * ((x * x) * (_SQRT_2_OVER_PI * _GELU_CUBIC) + _SQRT_2_OVER_PI)
        return _times_sigmoid(x, u, MATH)
    elif ACTIVATION == "sine":
        return _sine(x, 0)
    elif ACTIVATION == "softplus":
        return _softplus(x, MATH)
    elif ACTIVATION == "mish":
        _, p = _mish_parts(x, MATH)
        return x * (p / (p + 2.0))
    else:
        tl.static_assert(ACTIVATION == "gelu", "unknown activation")
        a = tl.minimum(tl.abs(x), _FAR)
        tail = _normal_tail(a, MATH)
        return tl.where(x < 0, x * tail, x - a * tail)


@triton.jit
def _times_sigmoid(x, half_z, MATH: tl.constexpr):
    """x * sigmoid(2 half_z)."""
    return x / (1.0 + _exp(-2.0 * half_z, MATH))


@triton.jit
def activation_grad(dy, saved, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """dy * act'(pre) in float32.

    ``saved`` is what the activation saves, its output or the pre-activation. It is ignored for
    ``"none"``.
    """
    if ACTIVATION == "none":
        return dy
    elif ACTIVATION == "relu":
        return tl.where(saved <= 0, 0.0, dy)
    elif ACTIVATION == "leaky_relu":
        return tl.where(saved > 0, dy, dy * _LEAKY_SLOPE)
    elif ACTIVATION == "relu2":
        return tl.where(saved <= 0, 0.0, dy * (2.0 * saved))
    elif ACTIVATION == "sigmoid":
        return dy * (saved * (1.0 - saved))
    elif ACTIVATION == "tanh":
        return dy * (1.0 - saved * saved)
    elif ACTIVATION == "silu":
        s = _sigmoid(0.5 * saved, MATH)
        return dy * (s * (1.0 + saved * (1.0 - s)))
    elif ACTIVATION == "quick_gelu":
        s = _sigmoid(saved * (0.5 * _QUICK_GELU), MATH)
        return dy * (s * (1.0 + (saved * _QUICK_GELU) * (1.0 - s)))
    elif ACTIVATION == "gelu_tanh":
        sq = saved * saved
        u = saved * (sq * (_SQRT_2_OVER_PI * _GELU_CUBIC) + _SQRT_2_OVER_PI)
        du = sq * (3.0 * _SQRT_2_OVER_PI * _GELU_CUBIC) + _SQRT_2_OVER_PI
        if MATH == "exact":
            t = _tanh(u, MATH)
            return dy * (0.5 * (1.0 + t) + 0.5 * saved * (1.0 - t * t) * du)
        else:
            # s = sigmoid(2u): d(x s)/dx = s + x s (1 - s) 2u'
            s = _sigmoid(u, MATH)
            return dy * (s * (1.0 + (2.0 * saved * du) * (1.0 - s)))
    elif ACTIVATION == "sine":
        return dy * _sine(saved, 1)
    elif ACTIVATION == "softplus":
        return dy * _one_less_exp(saved, MATH)
    elif ACTIVATION == "mish":
        e, p = _mish_parts(saved, MATH)
        v = 2.0 / (p + 2.0)  # 1 - tanh(softplus(x))
        slope = tl.where(saved > 40.0, 0.0, v * (2.0 - v) * (e / (1.0 + e)))
        return dy * (p / (p + 2.0) + saved * slope)
    else:
        tl.static_assert(ACTIVATION == "gelu", "unknown activation")
        tail = _normal_tail(tl.minimum(tl.abs(saved), _FAR), MATH)
        cdf = tl.where(saved < 0, tail, 1.0 - tail)
        # where x² rounds by much, nothing is left of the bell
        bell = tl.exp2((saved * saved) * (-0.5 * _LOG2E))
        return dy * (cdf + saved * (bell * _INV_SQRT_2PI))


@triton.jit
def activation_grad_at(dy, pre, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """dy * act'(pre) in float32, from the pre-activation whatever the activation saves."""
    if ACTIVATION == "sigmoid" or ACTIVATION == "tanh":
        return activation_grad(dy, activation(pre, ACTIVATION, MATH), ACTIVATION, MATH)
    elif ACTIVATION == "softplus":
        return dy * _sigmoid(0.5 * pre, MATH)
    else:
        return activation_grad(dy, pre, ACTIVATION, MATH)


@triton.jit
def activation_slopes(saved, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """act' of a smooth activation as a function of what it saves, and two derivatives by that."""
    if ACTIVATION == "tanh":
        return (1.0 - saved) * (1.0 + saved), saved * -2.0, tl.full(saved.shape, -2.0, tl.float32)
    elif ACTIVATION == "sigmoid":
        second = 1.0 - saved * 2.0
        return saved * (1.0 - saved), second, tl.full(saved.shape, -2.0, tl.float32)
    elif ACTIVATION == "softplus":
        rest = _exp(-saved, MATH)
        return _one_less_exp(saved, MATH), rest, -rest
    elif ACTIVATION == "sine":
        cosine = _sine(saved, 1)
        return cosine, -_sine(saved, 0), -cosine
    elif ACTIVATION == "silu":
        return _silu_slopes(saved, MATH)
    elif ACTIVATION == "quick_gelu":  # silu(c x) / c
        first, second, third = _silu_slopes(saved * _QUICK_GELU, MATH)
        return first, second * _QUICK_GELU, third * (_QUICK_GELU * _QUICK_GELU)
    else:
        tl.static_assert(ACTIVATION == "gelu", "not a smooth activation")
        first = activation_grad(tl.full(saved.shape, 1.0, tl.float32), saved, ACTIVATION, MATH)
        square = saved * saved
        density = tl.exp2(square * (-0.5 * _LOG2E)) * _INV_SQRT_2PI
        near = tl.minimum(square, 400.0)  # beyond, density is 0, and infinity times that NaN
        third = density * (near - 4.0) * tl.where(near < 400.0, saved, 0.0)
        return first, density * (2.0 - near), third


@triton.jit
def _silu_slopes(x, MATH: tl.constexpr):
    """Of s = sigmoid(x): t = s' without the cancellation of s (1 - s), t' = t u, u' = -2 t."""
    e = _exp(-tl.abs(x), MATH)
    s = tl.where(x < 0, e, 1.0) / (1.0 + e)
    t = e / ((1.0 + e) * (1.0 + e))
    u = 1.0 - s * 2.0
    return s + x * t, t * (2.0 + x * u), t * (3.0 * u + x * (u * u - 2.0 * t))
