"""Connectors: what turns the token grids of vision encoders into tokens of the language model.

`SpatialVisionAggregator` is Cambrian-1's connector (paper section 3): learned queries on a grid, each attending to the window of
every encoder's grid that lies under it. `TokenSampler`, its building block, also sits between decoder layers (`models.vlm`).
`MlpConnector` joins encoders on channels (LLaVA-1.5 and the baselines of both papers). Neither knows about text: slots in the
sequence, cropping and batching belong to `models.vlm`.

Alphabet: n images, E encoders, V connector width, D language width, q query side, r window side, N = n * q * q query cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmkit.config import ConnectorConfig
from mmkit.errors import InputError
from mmkit.letterbox import visible_cells


class VisionMemory(NamedTuple):
    """What samplers between decoder layers look at: for every query cell of every image, the encoders' windows under it."""

    context: Tensor  # (n, V) global context of the image
    windows: tuple[Tensor, ...]  # per encoder (n * q * q, r * r, V)
    mask: Tensor  # (n * q * q, sum of r * r) bool, True = attend


class ConnectorOutput(NamedTuple):
    """Language-model tokens of n images, and the memory of in-LLM samplers where the connector has one."""

    tokens: Tensor  # (n, q * (q + newline), D)
    memory: VisionMemory | None


def to_windows(grid: Tensor, side: int) -> Tensor:
    """(n, S*S, ...) -> (n*side*side, r*r, ...) with r = S // side: cell (y, x) gets rows y*r.. and columns x*r.., row by row."""
    n, cells, *rest = grid.shape
    r = int(cells**0.5) // side
    grid = grid.reshape(n, side, r, side, r, *rest).transpose(2, 3)  # (n, side, side, r, r, ...)
    return grid.reshape(n * side * side, r * r, *rest)


def window_mask(sizes: Tensor, grid_side: int, side: int) -> Tensor:
    """sizes (n, 2) of (width, height) -> (n*side*side, r*r) bool: cells of each window that show the image.

    A window without any such cell attends to all of its cells, as in training of the published weights (and no row is empty).
    """
    mask = to_windows(visible_cells(sizes, grid_side).flatten(1), side)
    return mask | ~mask.any(-1, keepdim=True)


def add_newlines(grid: Tensor, newline: Tensor) -> Tensor:
    """(n, q*q, D), (D,) -> (n, q*(q+1), D): one newline token after each row of the grid."""
    n, cells, d = grid.shape
    q = int(cells**0.5)
    column = newline.to(grid.dtype).expand(n, q, 1, d)
    return torch.cat([grid.view(n, q, q, d), column], dim=2).flatten(1, 2)


def _normed_linear(d_in: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(d_in), nn.Linear(d_in, d_out, bias=False))


def _bias_free_mlp(d_in: int, d_hidden: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, d_hidden, bias=False), nn.GELU(), nn.Linear(d_hidden, d_out, bias=False))


class CrossAttention(nn.Module):
    """Attention of queries over the tokens of several sources at once: one softmax, own key and value projections a source."""

    def __init__(self, d_source: int, d_hidden: int, n_sources: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = _normed_linear(d_hidden, d_hidden)
        self.keys = nn.ModuleList(_normed_linear(d_source, d_hidden) for _ in range(n_sources))
        self.values = nn.ModuleList(_normed_linear(d_source, d_hidden) for _ in range(n_sources))
        self.out = nn.Linear(d_hidden, d_hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor, *sources: Tensor) -> Tensor:
        """x (N, 1, H), mask (N, M) bool over the M tokens of all sources, each source (N, m, V) -> (N, 1, H)."""
        keys = torch.cat([project(source) for project, source in zip(self.keys, sources, strict=True)], dim=1)
        values = torch.cat([project(source) for project, source in zip(self.values, sources, strict=True)], dim=1)
        q, k, v = (self._split(t) for t in (self.query(x), keys, values))  # (N, M, H) -> (N, heads, M, K)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(mixed.transpose(1, 2).flatten(2))  # (N, heads, 1, K) -> (N, 1, H)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class WindowPosition(nn.Module):
    """Learned offset of each cell of a window."""

    def __init__(self, n_cells: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_cells, width))

    def forward(self, window: Tensor) -> Tensor:
        """(N, r*r, V) -> the same shape."""
        return window + self.weight


def _positions(window_sides: Sequence[int], width: int) -> nn.ModuleList:
    """One cell has no position to learn."""
    return nn.ModuleList(WindowPosition(r * r, width) if r > 1 else nn.Identity() for r in window_sides)


class JointLayer(nn.Module):
    """One sampler layer with one softmax over the windows of all encoders (the layer of all published models)."""

    def __init__(self, d_query: int, width: int, window_sides: Sequence[int], heads: int):
        super().__init__()
        self.context = nn.Linear(width, width, bias=False)
        self.query_in = nn.Linear(d_query + width, width, bias=False)
        self.positions = _positions(window_sides, width)
        self.attention = CrossAttention(width, width, len(window_sides), heads)
        self.norm = nn.LayerNorm(width)
        self.out = _bias_free_mlp(width, width, d_query)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, *windows: Tensor) -> Tensor:
        """x (N, 1, d_query), context (N, 1, V), mask (N, M), windows (N, r*r, V) each -> like x.

        Post-norm around the attention; the residual is the layer's raw input, not the projected query.
        """
        h = self.query_in(torch.cat([x, self.context(context)], dim=-1))
        placed = [position(window) for position, window in zip(self.positions, windows, strict=True)]
        h = self.norm(h + self.attention(h, mask, *placed))
        return x + self.out(h)


class SeparateLayer(nn.Module):
    """The variant with an attention of its own per encoder, mixed by a softmax over encoders (in no published model)."""

    def __init__(self, d_query: int, width: int, window_sides: Sequence[int], heads: int):
        super().__init__()
        self.window_cells = [r * r for r in window_sides]
        self.context = nn.Linear(width, width, bias=False)
        self.query_in = nn.Linear(d_query + width, width, bias=False)
        self.positions = _positions(window_sides, width)
        self.gate = _bias_free_mlp(d_query + width, width, len(window_sides)) if len(window_sides) > 1 else None
        self.sources = nn.ModuleList(
            CrossAttention(width, width, 1, heads) if r > 1 else _bias_free_mlp(width, width, width) for r in window_sides
        )
        self.norm = nn.LayerNorm(width)
        self.out = _bias_free_mlp(width, width, d_query)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, *windows: Tensor) -> Tensor:
        """As `JointLayer.forward`."""
        joined = torch.cat([x, self.context(context)], dim=-1)
        shares = self.gate(joined).softmax(-1) if self.gate else torch.ones_like(joined[..., :1])  # (N, 1, E)
        h = self.query_in(joined)
        masks = mask.split(self.window_cells, dim=1)
        seen = [
            source(h, cells, position(window)) if window.shape[1] > 1 else source(window)
            for source, cells, position, window in zip(self.sources, masks, self.positions, windows, strict=True)
        ]
        mixed = (torch.stack(seen, dim=-1) * shares[:, :, None, :]).sum(-1)  # (N, 1, V, E) -> (N, 1, V)
        return x + self.out(self.norm(h + mixed))


LAYERS: dict[str, type[nn.Module]] = {"joint": JointLayer, "separate": SeparateLayer}


class TokenSampler(nn.Module):
    """Layers that refine one query per grid cell by looking at the windows under it. All inputs are positional tensors."""

    def __init__(
        self, d_query: int, width: int, window_sides: Sequence[int], depth: int, heads: int, layer: type[nn.Module] = JointLayer
    ):
        super().__init__()
        self.layers = nn.ModuleList(layer(d_query, width, window_sides, heads) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, *windows: Tensor) -> Tensor:
        """x (N, 1, d_query), context (N, 1, V), mask (N, M) bool, windows (N, r*r, V) each -> like x."""
        for layer in self.layers:
            x = layer(x, context, mask, *windows)
        return x


class SpatialVisionAggregator(nn.Module):
    """Cambrian-1's connector: any number of encoders, groups of queries on grids of their own, any depth."""

    def __init__(self, config: ConnectorConfig, widths: Sequence[int], sides: Sequence[int], d_language: int):
        super().__init__()
        self.sides, self.query_sides = tuple(sides), tuple(config.query_sides)
        self.grid_side = config.grid_side or max(config.query_sides)
        width = config.width
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(w, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width)) for w in widths
        )
        self.queries = nn.Parameter(torch.randn(len(self.query_sides), width) * width**-0.5)
        self.groups = nn.ModuleList(
            TokenSampler(width, width, [s // q for s in sides], config.depth, config.heads, LAYERS[config.layer]) for q in self.query_sides
        )
        self.output = nn.Sequential(
            nn.Linear(width * len(self.query_sides), d_language), nn.GELU(), nn.Linear(d_language, d_language)
        )
        self.newline = nn.Parameter(torch.randn(d_language) * d_language**-0.5) if config.newline else None

    def forward(self, features: Sequence[Tensor], sizes: Tensor) -> ConnectorOutput:
        """features: per encoder (n, S*S, C); sizes (n, 2) original (width, height)."""
        projected = [project(f) for project, f in zip(self.projections, features, strict=True)]  # (n, S*S, V)
        context = projected[0].mean(1)  # over all cells of the first encoder, padding too, as trained
        memories = {q: self.memory(projected, context, sizes, q) for q in {*self.query_sides, self.grid_side}}
        grids = [self.sample(group, memories[q]) for group, q in enumerate(self.query_sides)]
        tokens = self.output(torch.cat(grids, dim=-1))  # (n, q*q, G*V) -> (n, q*q, D)
        if self.newline is not None:
            tokens = add_newlines(tokens, self.newline)
        return ConnectorOutput(tokens, memories[self.grid_side])

    def memory(self, projected: Sequence[Tensor], context: Tensor, sizes: Tensor, side: int) -> VisionMemory:
        """Windows and masks of every encoder for a query grid of this side."""
        windows = tuple(to_windows(grid, side) for grid in projected)
        mask = torch.cat([window_mask(sizes, s, side) for s in self.sides], dim=1)
        return VisionMemory(context, windows, mask)

    def sample(self, group: int, memory: VisionMemory) -> Tensor:
        """The group's queries after its sampler, resized to the language model's grid: (n, q*q, V)."""
        q = self.query_sides[group]
        n, width = memory.context.shape
        x = self.queries[group].to(memory.context.dtype).expand(n * q * q, 1, width)
        x = self.groups[group](x, each_cell(memory.context, q), memory.mask, *memory.windows)
        return resize_grid(x.view(n, q * q, width), self.grid_side)


class MlpConnector(nn.Module):
    """Encoders joined on channels, then ``depth`` linear layers with GELU between; depth 0 passes features on unchanged."""

    def __init__(self, config: ConnectorConfig, widths: Sequence[int], d_language: int):
        super().__init__()
        depth = {"mlp": config.depth, "linear": 1, "identity": 0}[config.kind]
        if not depth and sum(widths) != d_language:
            raise InputError(
                f"connector.kind 'identity' needs encoder widths that sum to the language model's {d_language}, "
                f"not {sum(widths)}; use 'linear'"
            )
        layers: list[nn.Module] = [nn.Linear(sum(widths), d_language)] if depth else []
        for _ in range(depth - 1):
            layers += [nn.GELU(), nn.Linear(d_language, d_language)]
        self.output = nn.Sequential(*layers)
        self.newline = nn.Parameter(torch.randn(d_language) * d_language**-0.5) if config.newline else None

    def forward(self, features: Sequence[Tensor], sizes: Tensor) -> ConnectorOutput:
        """features: per encoder (n, q*q, C) -> tokens (n, q*(q+newline), D); ``sizes`` is not looked at."""
        tokens = self.output(torch.cat(list(features), dim=-1))
        if self.newline is not None:
            tokens = add_newlines(tokens, self.newline)
        return ConnectorOutput(tokens, None)


def each_cell(context: Tensor, side: int) -> Tensor:
    """(n, V) -> (n*side*side, 1, V): the image's context beside each of its cells."""
    n, width = context.shape
    return context[:, None, :].expand(n, side * side, width).reshape(n * side * side, 1, width)


def resize_grid(grid: Tensor, side: int) -> Tensor:
    """(n, p*p, V) -> (n, side*side, V), bilinear in fp32."""
    n, cells, width = grid.shape
    p = int(cells**0.5)
    if p == side:
        return grid
    square = grid.transpose(1, 2).reshape(n, width, p, p)
    resized = F.interpolate(square.float(), size=(side, side), mode="bilinear", align_corners=False)
    return resized.flatten(2).transpose(1, 2).to(grid.dtype)


def build_connector(config: ConnectorConfig, widths: Sequence[int], sides: Sequence[int], d_language: int) -> nn.Module:
    """The connector of ``config`` for encoders of these widths and grid sides."""
    if config.kind == "sva":
        return SpatialVisionAggregator(config, widths, sides, d_language)
    return MlpConnector(config, widths, d_language)


@torch.no_grad()
def match_embeddings(connector: nn.Module, widths: Sequence[int], sides: Sequence[int], table: Tensor) -> None:
    """Shifts and scales an untrained connector's last layer so that image tokens have mean 0 and the
    spread of the text embeddings in ``table`` (V, D).

    Measured on standard normal features. As initialised, tokens are three times smaller and two thirds of each is the same for all
    pictures; a frozen language model first spends its updates on that constant.
    """
    last = connector.output[-1]
    if last.weight.is_meta:
        return
    spread = table.float().std()
    features = [torch.randn(32, side * side, width, device=last.weight.device) for side, width in zip(sides, widths, strict=True)]
    tokens = connector(features, torch.full((32, 2), max(sides), device=last.weight.device)).tokens
    if connector.newline is not None:
        side = int(tokens.shape[1] ** 0.5)
        tokens = tokens.unflatten(1, (side, side + 1))[:, :, :-1].flatten(1, 2)
        connector.newline.normal_().mul_(spread)
    mean = tokens.mean((0, 1))
    scale = spread / (tokens - mean).std()
    last.weight.mul_(scale)
    last.bias.sub_(mean).mul_(scale)


def check_features(features: Sequence[Tensor], widths: Sequence[int], sides: Sequence[int]) -> None:
    """ValueError where features (n, S*S, C) do not fit the encoders the connector was built for."""
    if len(features) != len(widths):
        raise InputError(f"{len(features)} feature grids for {len(widths)} encoders; give one grid an encoder, in the encoders' order")
    for index, (grid, width, side) in enumerate(zip(features, widths, sides)):
        if grid.shape[1] != side * side:
            raise InputError(
                f"encoder {index} gave {grid.shape[1]} tokens, the connector expects {side}x{side} = {side * side}; "
                f"set encoders.{index}.side"
            )
        if grid.shape[2] != width:
            raise InputError(f"encoder {index} gave tokens of width {grid.shape[2]}, the connector expects {width}; check encoders.{index}")
