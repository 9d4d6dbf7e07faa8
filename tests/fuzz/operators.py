"""The operators of random models: `{a}` is an operand, `{b}` one like it, `{d}` an axis."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)


class NoOperand(Exception):
    """Nothing that was computed so far fits the template."""


@dataclass
class Scope:
    """Names and values at one place of a model that is being drawn."""

    dice: random.Random
    tensors: dict[str, torch.Tensor]
    weights: list[tuple[str, str]] = field(default_factory=list)  # new parameters: name, expression

    def pick(self, accept: Callable[[torch.Tensor], bool]) -> str:
        """The name of a tensor that is accepted, later ones more often."""
        names = [name for name, value in self.tensors.items() if accept(value)]
        if not names:
            raise NoOperand
        return names[max(self.dice.randrange(len(names)) for _ in range(2))]

    def like(self, name: str) -> str:
        """A tensor of the same dtype whose shape broadcasts with the named one's."""
        one = self.tensors[name]

        def fits(x: torch.Tensor) -> bool:
            pairs = zip(reversed(x.shape), reversed(one.shape), strict=False)
            return x.dtype == one.dtype and all(a == b or 1 in (a, b) for a, b in pairs)

        return self.pick(fits)

    def axis(self, name: str) -> int:
        """A dimension of the named tensor, counted from either end."""
        rank = self.tensors[name].ndim
        return self.dice.randrange(-rank, rank) if rank else 0

    def size(self, name: str, axis: int) -> int:
        """A size of the named tensor."""
        return int(self.tensors[name].shape[axis])

    def weight(self, *shape: int) -> str:
        """The name of a new parameter of this shape."""
        name = f"w{len(self.weights)}"
        sizes = "".join(f"{size}, " for size in shape)
        self.weights.append((name, f"torch.randn({sizes}generator=g) * 0.5"))
        return name

    def integers(self, low: int, high: int, dtype: str, *shape: int) -> str:
        """The name of a new buffer of integers of this shape."""
        name = f"w{len(self.weights)}"
        drawn = f"torch.randint({low}, {high}, {shape}, generator=g, dtype=torch.{dtype})"
        self.weights.append((name, drawn))
        return name

    def choose(self, *items: Any) -> Any:
        """One of these."""
        return self.dice.choice(items)


Template = Callable[[Scope], str]

_REAL = """
torch.relu({a}); torch.sigmoid({a}); torch.tanh({a}); torch.erf({a}); F.silu({a}); F.softplus({a})
F.mish({a}); F.hardswish({a}); F.elu({a}); F.gelu({a}); F.gelu({a}, approximate='tanh'); F.leaky_relu({a})
F.relu6({a}); F.hardsigmoid({a}); F.softsign({a}); F.selu({a}); F.celu({a}); F.logsigmoid({a})
F.hardtanh({a}); torch.atan({a}); torch.sin({a}); torch.cos({a}); torch.floor({a}); torch.ceil({a})
torch.round({a}); torch.trunc({a}); torch.sign({a}); torch.square({a}); torch.isnan({a}); torch.isinf({a})
torch.isfinite({a}); torch.signbit({a}.nan_to_num()); torch.sinc({a}); torch.exp({a}.clamp(-4, 4))
torch.expm1({a}.clamp(-4, 4)); torch.log({a}.abs() + 0.5); torch.sqrt({a}.abs())
torch.rsqrt({a}.abs() + 0.25); torch.reciprocal({a}.abs() + 0.5); torch.log1p({a}.abs())
torch.log2({a}.abs() + 1); torch.asin({a}.clamp(-0.9, 0.9)); torch.sinh({a}.clamp(-3, 3)); {a} ** 2
{a} ** 3; torch.nan_to_num({a}); {a}.pow(0.5).nan_to_num(1.5); {a}.frac(); {a}.logit(1e-3)
"""
_ANY = """
{a} + {b}; {a} - {b}; {a} * {b}; {a} < {b}; {a} <= {b}; {a} > {b}; {a} >= {b}; {a} == {b}; {a} != {b}
{a} + 2; 1 - {a}; {a} * 0.5; {a} * -1; {a} / 4; {a} + 1e-3; torch.add({a}, {b}, alpha=2)
{a} / ({b}.abs() + 1); {a} // 3; {a} % 3; torch.div({a}, 4, rounding_mode='trunc'); {a}.clamp(-1, 1)
{a}.clamp(min=0); {a}.clamp(max=2); torch.zeros_like({a}); torch.full_like({a}, 2); {a}.clone(); {a}.bool()
{a}.float(); {a}.double(); {a}.to(torch.float32, copy=True); torch.abs({a}); torch.neg({a})
torch.maximum({a}, {b}); torch.minimum({a}, {b})
"""
_CAST = """
{a}.nan_to_num(0).clamp(-100, 100).to(torch.int64); {a}.nan_to_num(0).clamp(-100, 100).to(torch.int32)
{a}.to(torch.float16); {a}.to(torch.bfloat16); {a}.to(torch.float64); {a}.to(torch.float32); {a} > 0
"""
_SINGLE_PAIR = """
torch.remainder({a}, {b}); torch.fmod({a}, {b}); torch.atan2({a}, {b}); torch.hypot({a}, {b})
torch.fmax({a}, {b}); torch.fmin({a}, {b}); torch.copysign({a}, {b}.nan_to_num()); torch.lerp({a}, {b}, 0.25)
"""
_WHOLE = """
{a} & {b}; {a} | {b}; {a} ^ {b}; ~{a}; {a} << 1; {a} >> 1; {a}.abs(); -{a}; {a}.sign(); {a}.clamp(-2, 3)
{a} // 2; torch.maximum({a}, {b}); torch.relu({a}); {a}.bool(); {a}.sum(); {a} % 3; {a} ** 2
"""
_MASK = """
~{a}; {a} & {b}; {a} | {b}; {a} ^ {b}; {a}.any(); {a}.all(); {a}.sum(); {a}.float(); {a}.long()
"""
_SHAPED = """
{a}.reshape(-1); {a}.flatten(); {a}.unsqueeze({d}); {a}.reshape({a}.shape[0], -1); {a}[None]; {a}[0]
{a}[-1]; {a}[..., 1:]; {a}[..., ::2]; {a}[:, None]; {a}.narrow(-1, 0, 1); {a}[..., -2:]; {a}.select({d}, 0)
{a}.roll(1, {d}); {a}.unbind({d})[0]; {a}.chunk(2, {d})[0]; {a}.split(1, {d})[-1]
{a}.index_select({d}, torch.tensor([0, 0])); {a}.squeeze(); {a}.diff(dim={d})
{a}.unsqueeze(0).expand(2, *{a}.shape); {a}.repeat(*([1] * ({a}.ndim - 1)), 2)
{a}.repeat_interleave(2, {d}); F.pad({a}, (1, 1)); F.pad({a}, (0, 1), value=2); {a}.flip({d})
torch.arange({a}.shape[0]); torch.ones({a}.shape[0], 3); torch.eye(3); torch.linspace(0, 1, 4)
torch.full(({a}.shape[-1],), 2); torch.cat([{a}, {a}], {d}); torch.stack([{a}, {a}], {d}); {a}.numel() + {a}
"""
_MATRIX = """
{a}.transpose(0, -1); {a}.movedim(0, -1); {a}.swapaxes(-1, -2); {a}.flatten(0, 1); {a}.mT; {a}.tril()
{a}.triu(1); {a}.permute(*range({a}.ndim - 1, -1, -1)); {a}.transpose(-1, -2).contiguous(); {a}.diagonal()
{a}.rot90(); {a}.view({a}.shape[0], -1)
"""
_REDUCED = """
{a}.sum({d}); {a}.mean({d}, keepdim=True); {a}.amax({d}); {a}.amin({d}, keepdim=True); {a}.softmax({d})
{a}.log_softmax({d}); {a}.cumsum({d}); {a}.logsumexp({d}); {a}.argmax({d}); {a}.argmin({d})
{a}.norm(dim={d}); {a}.var({d}, correction=0); {a}.std({d}, correction=0); {a}.max({d}).values
{a}.min({d})[0]; {a}.sum(); {a}.mean(); {a}.prod({d}); {a}.sort({d}).values; {a}.any({d})
{a}.gather({d}, {a}.argsort({d}, stable=True)); {a}.scatter({d}, {a}.argsort({d}, stable=True), 1.5)
{a}.scatter_add({d}, {a}.argsort({d}, stable=True), {a}); {a}.topk(1, {d}).values
{a}.index_fill({d}, torch.tensor([0]), 3); {a}.masked_fill({a} > 0, 0); {a}.cumprod({d})
torch.cond({a}.sum() > 0, lambda t: t.sin() + 1, lambda t: t * 2, ({a},)); {a}.aminmax(dim={d}).max
"""
_WHOLE_REDUCED = (
    "{a}.sum({d}); {a}.any({d}); {a}.all({d}); {a}.cumsum({d}); {a}.sum(); {a}.amax({d}); {a}.sort({d})[0]"
)
_PRODUCT = """
{a} @ {a}.mT; torch.matmul({a}.mT, {a}); torch.einsum('...ij,...kj->...ik', {a}, {a})
F.rms_norm({a}, {a}.shape[-1:])
"""
_IMAGE = """
F.max_pool2d({a}, 2); F.avg_pool2d({a}, 2); F.adaptive_avg_pool2d({a}, 1); F.max_pool2d({a}, 3, 1, 1)
F.unfold({a}, 2); F.interpolate({a}, scale_factor=2, mode='nearest')
F.interpolate({a}, scale_factor=2.0, mode='bilinear'); F.avg_pool2d({a}, 3, 2, 1)
F.adaptive_max_pool2d({a}, 1); F.pixel_shuffle({a}.repeat(1, 4, 1, 1), 2)
"""
_ATTENTION = """
F.scaled_dot_product_attention({a}, {a}, {a}); F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)
"""
_BRANCHES = """
({a}.sin() if {a}.sum() > 0 else {a} * 2); ({a} * 2 if {a}.shape[0] > 2 else {a} - 1)
torch.cond({a}.mean() > 0, lambda t: t.relu(), lambda t: t.cumsum(-1) - 1, ({a},))
torch.cond({a}.amax() > 1, lambda t, u: t + u, lambda t, u: t * u.sigmoid(), ({a}, {b}))
sum({a} * place for place in range({a}.shape[-1])); [{a}, {a} + 1, {a}.tanh()][{a}.ndim % 3]
"""
_MODES = """
F.dropout({a}, 0.5, self.training); F.rrelu({a}, training=self.training)
F.alpha_dropout({a}, 0.3, self.training); ({a} * 3 if self.training else {a} + 1)
F.batch_norm({a}[:, None], torch.zeros(1), torch.ones(1) * 2, training=self.training)
"""
_IN_PLACE = """
{a}.add_(1); {a}.mul_(2); {a}.clamp_(max=1); {a}[..., 0].fill_(0.5); {a}.copy_({a} * 0.5); {a}.zero_()
{a}.relu_(); {a}.view(-1)[0:1].neg_(); {a}[0].add_(1); {a}.transpose(0, -1).mul_(0.5)
"""


def _forms(text: str) -> tuple[str, ...]:
    return tuple(form.strip() for line in text.strip().splitlines() for form in line.split("; "))


def _table(text: str, accept: Callable[[torch.Tensor], bool]) -> Template:
    """A template that fills one of the forms with an operand that is accepted."""
    forms = _forms(text)

    def template(s: Scope) -> str:
        a = s.pick(accept)
        form = s.choose(*forms)
        b = s.like(a) if "{b}" in form else ""
        return str(form.format(a=a, b=b, d=s.axis(a) if "{d}" in form else 0))

    return template


def _is_single(x: torch.Tensor) -> bool:
    return x.dtype in FLOATS[:2]


def select(s: Scope) -> str:
    """A choice between two tensors by a mask."""
    a = s.pick(lambda x: True)
    mask = s.pick(lambda x: x.dtype is torch.bool and _broadcasts(x, s.tensors[a]))
    forms = ("torch.where({m}, {a}, {b})", "{a}.masked_fill({m}, 2)", "torch.where({m}, {a}, 1)")
    return str(s.choose(*forms)).format(a=a, b=s.like(a), m=mask)


def join(s: Scope) -> str:
    """Two tensors of one shape made one."""
    a = s.pick(lambda x: x.ndim >= 1)
    like = s.tensors[a]
    b = s.pick(lambda x: x.shape == like.shape and x.dtype == like.dtype)
    return f"{s.choose('torch.cat', 'torch.stack')}([{a}, {b}], {s.axis(a)})"


def linear(s: Scope) -> str:
    """A product with new weights."""
    a = s.pick(lambda x: x.dtype is torch.float32 and x.ndim >= 1)
    wide, out = s.size(a, -1), s.choose(1, 3, 4, 8)
    if s.choose(True, False):
        return f"F.linear({a}, {s.weight(out, wide)}, {s.weight(out)})"
    return f"{a} @ {s.weight(wide, out)}"


def quantized(s: Scope) -> str:
    """A product with a new weight in few bits, unpacked as libraries do it."""
    a = s.pick(lambda x: x.dtype is torch.float32 and x.ndim >= 1)
    wide, out, group = s.size(a, -1), s.choose(8, 16), s.choose(16, 32, 64)
    kind = s.choose("rows", "behind", "halves", "words", "table")
    if kind in ("rows", "behind"):
        weight, scale = s.integers(-128, 128, "int8", out, wide), f"({s.weight(out)} * 0.02)"
        product = f"{a} @ {weight}.float().t()"
        return f"({product}) * {scale}" if kind == "behind" else f"F.linear({a}, {weight} * {scale}[:, None])"
    x, count = f"({a} @ {s.weight(wide, 64)})", 64 // group
    scale = f"({s.weight(out, count)} * 0.1)[:, :, None]"
    if kind in ("halves", "table"):
        weight, zero = s.integers(0, 256, "uint8", out, 32), s.integers(0, 16, "uint8", out, count)
        numbers = f"torch.stack([{weight} & 15, {weight} >> 4], -1).view({out}, {count}, {group}).float()"
        dense = f"((({numbers} - {zero}[:, :, None]) * {scale}).flatten(1))"
        return f"F.linear({x}, {dense})" if kind == "halves" else f"F.embedding({x}.argmax(-1) % 8, {dense})"
    weight, zero = s.integers(-(2**31), 2**31, "int32", 64, out // 8), s.integers(0, 16, "int32", out, count)
    shifts = f"(torch.tensor({s.choose([0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7])}) * 4)"
    numbers = f"(({weight}[:, :, None] >> {shifts}) & 15).view(64, {out}).t()"
    grouped = f"({numbers}.reshape({out}, {count}, {group}) - {zero}[:, :, None])"
    order = s.choose("", "[:, torch.arange(63, -1, -1)]", "[:, torch.arange(64).view(2, 32).t().flatten()]")
    return f"{x} @ ({grouped} * {scale}).flatten(1){order}.t()"


def rounded(s: Scope) -> str:
    """A product of activations and weights in 8 bits, by a scale of each row, or by one that is known."""
    a = s.pick(lambda x: x.dtype is torch.float32 and x.ndim >= 1)
    wide, out = s.size(a, -1), s.choose(8, 16)
    kind = s.choose("rows", "numbers", "known", "zero point")
    if kind == "rows" and wide == 1:  # of one column `torch._int_mm` makes any numbers (torch 2.13, x86_64)
        raise NoOperand
    weight, by_row = s.integers(-128, 128, "int8", out, wide), f"({s.weight(out)} * 0.02)"
    # A scale by which the largest is 127 exactly: at 127.5 every rounding of a quotient decides.
    scale = "0.03" if kind == "known" else f"({a}.abs().amax(-1, keepdim=True) / 127 + 1e-5)"
    if kind == "zero point":
        q, settings = "torch.ops.quantized_decomposed", f"0.03, {s.choose(0, 100, 128)}, 0, 255, torch.uint8"
        x = f"{q}.dequantize_per_tensor({q}.quantize_per_tensor({a}, {settings}), {settings})"
        table = f"{weight}, {by_row}, torch.zeros({out}, dtype=torch.int64), 0, -128, 127, torch.int8"
        return f"F.linear({x}, {q}.dequantize_per_channel({table}))"
    integers = f"({a} / {scale}).round().clamp(-128, 127)"
    if kind != "rows":
        return f"F.linear({integers} * {scale}, {weight} * {by_row}[:, None], {s.weight(out)})"
    sums = f"torch._int_mm({integers}.to(torch.int8).reshape(-1, {wide}), {weight}.t())"
    return f"({sums}.float() * {scale}.reshape(-1, 1) * {by_row}).reshape(*{a}.shape[:-1], {out})"


def norm(s: Scope) -> str:
    """A norm with new weights."""
    a = s.pick(lambda x: x.dtype is torch.float32 and x.ndim >= 2)
    wide, channels = s.size(a, -1), s.size(a, 1)
    kind = s.choose("layer", "group", "unit")
    if kind == "layer":
        return f"F.layer_norm({a}, ({wide},), {s.weight(wide)}, {s.weight(wide)})"
    return f"F.group_norm({a}, 1, {s.weight(channels)})" if kind == "group" else f"F.normalize({a}, dim=-1)"


def convolution(s: Scope) -> str:
    """A convolution with new weights."""
    a = s.pick(lambda x: x.dtype is torch.float32 and x.ndim in (3, 4))
    channels, out, spatial = s.size(a, 1), s.choose(1, 2, 4), s.tensors[a].ndim - 2
    kernel = [s.choose(1, 2, 3)] * spatial
    form = s.choose("padding=1", "stride=2, padding=1", "padding=2, dilation=2", "padding=1")
    return f"F.conv{spatial}d({a}, {s.weight(out, channels, *kernel)}, {s.weight(out)}, {form})"


def lookup(s: Scope) -> str:
    """Rows of a table by number."""
    a = s.pick(lambda x: x.dtype in INTEGERS)
    kind = s.choose("embedding", "one_hot", "index")
    if kind == "embedding":
        return f"F.embedding({a} % 4, {s.weight(4, 3)})"
    return f"F.one_hot({a}.long() % 4, 4)" if kind == "one_hot" else f"torch.arange(4)[{a} % 4]"


in_place = _table(_IN_PLACE, lambda x: x.dtype is torch.float32 and x.ndim >= 1)
branch = _table(_BRANCHES, lambda x: x.dtype is torch.float32 and x.ndim >= 1)
mode = _table(_MODES, lambda x: x.dtype is torch.float32 and x.ndim >= 1)
_real = _table(_REAL, lambda x: x.is_floating_point())
_any = _table(_ANY, lambda x: True)
_shaped = _table(_SHAPED, lambda x: x.ndim >= 1)
_reduced = _table(_REDUCED, lambda x: _is_single(x) and x.ndim >= 1)

# A family stands here as often as it should be drawn.
TEMPLATES: tuple[Template, ...] = (
    *(_real, _real, _any, _any, _any, _shaped, _shaped, _shaped, _reduced, _reduced),
    *(select, join, linear, linear, norm, convolution, lookup),
    _table(_CAST, lambda x: x.is_floating_point()),
    _table(_SINGLE_PAIR, _is_single),
    _table(_WHOLE, lambda x: x.dtype in INTEGERS),
    _table(_MASK, lambda x: x.dtype is torch.bool),
    _table(_MATRIX, lambda x: x.ndim >= 2),
    _table(_WHOLE_REDUCED, lambda x: x.ndim >= 1 and x.dtype in (*INTEGERS, torch.bool)),
    _table(_PRODUCT, lambda x: _is_single(x) and x.ndim >= 2),
    _table(_IMAGE, lambda x: x.dtype is torch.float32 and x.ndim == 4),
    _table(_ATTENTION, lambda x: x.dtype is torch.float32 and x.ndim in (3, 4)),
)


def _broadcasts(mask: torch.Tensor, x: torch.Tensor) -> bool:
    pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    return mask.ndim <= x.ndim and all(a in (1, b) for a, b in pairs)
