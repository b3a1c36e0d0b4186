"""The Vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929), in the order of the paper's equations.

In: a `ViTConfig` and images, float [b, c, height, width], normalised by `preprocessing.normalise`.
Out: logits [b, classes], or the tokens and the representation.
Use: `model = ViT(config)`; `model.initialise(seed)`; `logits = model(images)`.

Letters in shapes: b batch, n tokens, d width, h heads, e width of a head (d / h), c channels, p patch size.
The parameters have timm's names, so that few tensors of foreign checkpoints need renaming.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_model.blocks import Angles, AttentionPool, Block, PatchEmbed, rope, sincos2d, sincos2d_moco
from vit_model.config import ViTConfig
from vit_model.parts import ParameterGroups, as_map, check_images, lecun_normal_


class ViT(ParameterGroups):
    """The encoder and its head. Built on torch's default device with the weights of `initialise(seed=0)`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        """Whether a block keeps only its input for the backward pass, which recomputes the rest. Same results."""
        device = torch.get_default_device()
        # On "meta" first, because torch's own initialisation would be wasted and would advance the global generator.
        with torch.device("meta"):
            self._build(config)
        self.to_empty(device=device)
        if device.type != "meta":
            self.initialise(seed=0)

    def _build(self, config: ViTConfig) -> None:
        width = config.width
        self.patch_embed = PatchEmbed(config)
        if config.class_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        if config.distillation:
            self.dist_token = nn.Parameter(torch.empty(1, 1, width))
        if config.registers:
            self.reg_token = nn.Parameter(torch.empty(1, config.registers, width))
        tables = config.num_blocks if config.position_at == "every_layer" else 1
        if config.position == "learned1d":
            entries = config.num_class_positions + config.num_patches
            self.pos_embed = nn.Parameter(torch.empty(tables, entries, width))
        if config.position == "learned2d":
            rows, columns = config.grid
            self.pos_embed_y = nn.Parameter(torch.empty(tables, rows, width // 2))
            self.pos_embed_x = nn.Parameter(torch.empty(tables, columns, width // 2))
        self.dropout = nn.Dropout(config.dropout)
        if config.norm_first:
            self.norm_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        if config.norm_after_pooling:
            self.fc_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        else:
            self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if config.pooling == "map":
            self.attn_pool = AttentionPool(config)
        if config.representation_head:
            self.pre_logits = nn.Linear(width, width)
        if config.num_classes:
            self.head = nn.Linear(width, config.num_classes)
            if config.distillation:
                self.head_dist = nn.Linear(width, config.num_classes)

    @property
    def last_layer(self) -> int:
        """The number of the layer of the final norm and the head, after the blocks, which are 1 to `num_blocks`."""
        return self.config.num_blocks + 1

    def layer_of(self, name: str) -> int:
        first, _, rest = name.partition(".")
        if first == "blocks":
            return 1 + int(rest.partition(".")[0])
        # patches, the norm before the blocks, and what is a parameter of the model itself: tokens, positions
        return 0 if first in ("patch_embed", "norm_pre") or not rest else self.last_layer

    def is_block_matrix(self, name: str) -> bool:
        return name.startswith("blocks.") and name.endswith(".weight") and self.get_parameter(name).ndim == 2

    def width_of(self, name: str) -> int | None:
        is_matrix = name.endswith(".weight") and self.get_parameter(name).ndim == 2
        return self.config.width if is_matrix and not name.startswith("patch_embed.") else None

    def forward(self, images: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """[b, c, height, width] -> logits [b, classes], or the representation [b, d] without a head.

        `drop_path_draws` [b, blocks, 2] decide about stochastic depth in training, see `drop_path_factors`.

        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights', or for draws
        of another shape.
        """
        representation, distilled = self.read(images, drop_path_draws)
        return self.classify(representation, distilled) if self.config.num_classes else representation

    def read(self, images: Tensor, drop_path_draws: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[b, c, height, width] -> the representation [b, d] and the distillation token [b, d], if there is one.

        The last block only computes the tokens that are read, which saves 7% of a training step with 12 blocks, 15%
        with 4. `drop_path_draws` and errors: see `forward`.
        """
        pooled = 1 + self.config.distillation if self.config.pooling == "cls" else None
        tokens = self.encode(self.embed(images), pooled, drop_path_draws)
        return self.represent(tokens), tokens[:, 1] if self.config.distillation else None

    def classify(self, representation: Tensor, distilled: Tensor | None = None) -> Tensor:
        """Map `read`'s result to logits [b, classes], the mean of both heads if there is a distillation token."""
        logits: Tensor = self.head(representation)
        return logits if distilled is None else (logits + self.head_dist(distilled)) / 2

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[b, c, height, width] -> tokens [b, n, d] of the encoder, representation y [b, d] (eq. 4).

        The tokens are normed unless the norm comes after pooling. y is the class token, the mean of the patches' tokens
        or the output of the MAP head, followed by the tanh layer, if any.
        Raises ValueError if the images' size is not the configuration's, or their dtype not the weights'.
        """
        tokens = self.encode(self.embed(images))
        return tokens, self.represent(tokens)

    def normed_tokens(self, images: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """[b, c, height, width] -> the tokens [b, n, d] behind the last norm, also if the norm comes after pooling."""
        tokens = self.encode(self.embed(images), drop_path_draws=drop_path_draws)
        return self.fc_norm(tokens) if self.config.norm_after_pooling else tokens

    def pooling_weights(self) -> Iterator[nn.Parameter]:
        """Yield the weights that no output of the tokens depends on: the pooling, the tanh layer, a second head."""
        for name, parameter in self.named_parameters():
            if name.startswith(("attn_pool.", "pre_logits.", "head_dist.")):
                yield parameter

    def embed(self, images: Tensor) -> Tensor:
        """Eq. 1: [b, c, height, width] -> the first block's input [b, n, d], class token and registers first."""
        check_images(images, self.config, self.patch_embed.proj.weight.dtype)
        return self.assemble(self.patch_embed(images))

    def assemble(self, patches: Tensor) -> Tensor:
        """Prepend the other tokens to patch embeddings [b, patches, d] and add positions: [b, n, d]."""
        config = self.config
        prefix = [self.cls_token] if config.class_token else []
        prefix += [self.dist_token] if config.distillation else []
        prefix += [self.reg_token] if config.registers else []
        x = torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in prefix), patches], dim=1)
        if config.position_at == "stem" and (table := self.positions(0)) is not None:
            x = x + table.to(x.dtype)
        x = self.dropout(x)
        return self.norm_pre(x) if config.norm_first else x  # type: ignore[no-any-return]

    def encode(self, x: Tensor, first: int | None = None, drop_path_draws: Tensor | None = None) -> Tensor:
        """Eq. 2 to 4: [b, n, d] -> the last block's output [b, n, d], normed unless the norm comes after pooling.

        With `first`, only the first tokens' part, [b, first, d]. `drop_path_draws`: see `drop_path_factors`.
        """
        for state in self.states(x, first, drop_path_draws):
            x = state
        return x if self.config.norm_after_pooling else self.norm(x)

    def states(self, x: Tensor, first: int | None = None, drop_path_draws: Tensor | None = None) -> Iterator[Tensor]:
        """Eq. 2 and 3: yield the input of each block, with positions added, then the output of the last, [b, n, d]."""
        config, factors, angles = self.config, self.drop_path_factors(x, drop_path_draws), self.angles()
        recomputes = self.activation_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.blocks):
            block = partial(checkpoint, layer, use_reentrant=False) if recomputes else layer
            if config.position_at != "stem":
                table = self.positions(index if config.position_at == "every_layer" else 0)
                assert table is not None
                x = x + table.to(x.dtype)
            yield x
            if config.axial:
                x = along_axis(block, x, config.grid, index % 2)
            else:
                of_images = None if factors is None else factors[index]
                x = block(x, first if index == len(self.blocks) - 1 else None, of_images, angles)
        yield x

    def drop_path_factors(self, x: Tensor, draws: Tensor | None = None) -> Tensor | None:
        """Return the factors of each block's branches for each image of x, [blocks, 2, b, 1, 1], in x's dtype.

        Stochastic depth (Huang et al. 2016) leaves a branch out for an image if its draw is below the block's rate,
        which rises linearly from 0 to `stochastic_depth`; the others are scaled up, as in timm. Blocks draw nothing, so
        they do the same when they are recomputed. Returns None without stochastic depth and outside training.

        Args:
            draws: [b, blocks, 2], uniform in [0, 1), for attention and MLP; None: from torch's generator.
        """
        rate, blocks = self.config.stochastic_depth, self.config.num_blocks
        if not rate or not self.training:
            return None
        if draws is None:
            draws = torch.rand((len(x), blocks, 2), device=x.device)
        rates = torch.linspace(0, rate, blocks, dtype=torch.float64, device=x.device)[:, None]
        factors = (draws >= rates) / (1 - rates)
        return factors.to(x.dtype).permute(1, 2, 0)[..., None, None]

    def represent(self, tokens: Tensor) -> Tensor:
        """The encoder's tokens [b, n, d] -> the representation y [b, d]."""
        config = self.config
        if config.pooling == "cls":
            y = tokens[:, 0]
        elif config.pooling == "map":
            y = self.attn_pool(tokens)
        else:
            y = tokens[:, config.num_prefix_tokens :].mean(dim=1)
            if config.norm_after_pooling:
                y = self.fc_norm(y)
        return torch.tanh(self.pre_logits(y)) if config.representation_head else y

    def positions(self, layer: int) -> Tensor | None:
        """Return the positions added before block `layer`, [1, n, d]; None without position embeddings."""
        config = self.config
        if not config.adds_positions:
            return None
        class_entries = 0
        if config.position == "learned1d":
            table, class_entries = self.pos_embed[layer : layer + 1], config.num_class_positions
        elif config.position == "learned2d":
            y, x = self.pos_embed_y[layer], self.pos_embed_x[layer]
            # [rows, columns, d / 2]
            both = [x[None].expand(len(y), -1, -1), y[:, None].expand(-1, len(x), -1)]
            table = torch.cat(both, dim=-1).reshape(1, config.num_patches, config.width)
        else:
            fixed = sincos2d_moco if config.position == "sincos2d_moco" else sincos2d
            table = fixed(config.grid, config.width, self.patch_embed.proj.weight.device)
        unplaced = config.num_prefix_tokens - class_entries
        if not unplaced:
            return table
        zeros = table.new_zeros(1, unplaced, config.width)
        return torch.cat([table[:, :class_entries], zeros, table[:, class_entries:]], dim=1)

    def angles(self) -> Angles | None:
        """Return the rotary positions of the patches; None without them."""
        config = self.config
        if config.position != "rope":
            return None
        return rope(config.grid, config.width // config.num_heads, self.patch_embed.proj.weight.device)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialise all weights as the authors' JAX code does (vision_transformer, models_vit.py).

        ViTs with GAP or a MAP head are initialised in the same way; big_vision instead starts them from position
        embeddings of std 1 / sqrt(d), which is 0.036 for B and 0.072 for Ti.

        | parameter                             | distribution                                        |
        |---------------------------------------|-----------------------------------------------------|
        | patch_embed.proj, convolutions        | LeCun normal: variance 1 / fan-in, cut at 2 std     |
        | pre_logits.weight                     | the same                                            |
        | pos_embed of all kinds                | normal, std 0.02                                    |
        | query, key, value, proj weights       | uniform within sqrt(6 / 2d): Xavier, each as [d, d] |
        | weights of mlp.fc1, fc2, gate         | uniform within sqrt(6 / (d + mlp_dim)): Xavier      |
        | biases of mlp.fc1, fc2, gate          | normal, std 1e-6                                    |
        | attn_pool.latent                      | uniform within sqrt(6 / (1 + d)): Xavier            |
        | dist_token, reg_token                 | normal, std 0.02 (DeiT), 1e-6 (timm)                |
        | layer and group norms                 | weight 1, bias 0; a stem unit's last weight 0       |
        | ls1.gamma, ls2.gamma                  | `layer_scale`                                       |
        | head, head_dist                       | weight 0, bias `head_bias`                          |
        | cls_token and every other bias        | 0                                                   |

        Weights are drawn on the CPU in float32, so a seed gives the same weights on every device.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            self._draw(name, drawn, generator)
            parameter.copy_(drawn)

    def _draw(self, name: str, drawn: Tensor, generator: torch.Generator) -> None:
        """Fill the zeros `drawn` with the initial values of the parameter `name`."""
        width, mlp_dim = self.config.width, self.config.mlp_dim
        owner, _, leaf = name.rpartition(".")
        layer = owner.rpartition(".")[2]
        if layer in ("fc1", "fc2", "gate") and leaf == "bias":
            drawn.normal_(std=1e-6, generator=generator)
        elif layer in ("fc1", "fc2", "gate"):
            bound = math.sqrt(6 / (width + mlp_dim))
            drawn.uniform_(-bound, bound, generator=generator)
        elif leaf == "latent":
            bound = math.sqrt(6 / (1 + width))
            drawn.uniform_(-bound, bound, generator=generator)
        elif layer in ("qkv", "q", "kv", "proj") and leaf == "weight" and owner != "patch_embed.proj":
            bound = math.sqrt(6 / (2 * width))
            drawn.uniform_(-bound, bound, generator=generator)
        elif (
            (owner == "pre_logits" and leaf == "weight")
            or (owner == "patch_embed.proj" and leaf == "weight")
            or drawn.ndim == 4
        ):
            lecun_normal_(drawn, generator)
        elif leaf in ("pos_embed", "pos_embed_x", "pos_embed_y", "dist_token"):
            drawn.normal_(std=0.02, generator=generator)
        elif leaf == "reg_token":
            drawn.normal_(std=1e-6, generator=generator)
        elif leaf == "gamma":
            assert self.config.layer_scale is not None
            drawn.fill_(self.config.layer_scale)
        elif "norm" in layer and leaf == "weight":
            drawn.fill_(0.0 if layer == "norm3" else 1.0)
        elif layer in ("head", "head_dist") and leaf == "bias":
            drawn.fill_(self.config.head_bias)


class Segmenter(ViT):
    """A ViT that classifies pixels: its classifier reads the token of each patch (linear decoder, Strudel et al. 2021).

    The logits are resized to the pixels, bilinearly. The weights are a `ViT`'s; a contract has the classes' names in
    `mask_classes`.
    """

    def forward(self, images: Tensor, drop_path_draws: Tensor | None = None) -> Tensor:
        """[b, c, height, width] -> logits [b, classes, rows, columns]. See `ViT.forward`."""
        tokens = self.normed_tokens(images, drop_path_draws)[:, self.config.num_prefix_tokens :]
        return as_map(self.head(tokens), self.config.grid)


def along_axis(block: Callable[[Tensor], Tensor], x: Tensor, grid: tuple[int, int], axis: int) -> Tensor:
    """Apply a block to each row (axis 0) or column (1) of the grid separately: [b, rows * columns, d] -> the same."""
    lines = split_lines(x, grid, axis)
    out: Tensor = block(lines.flatten(0, 1)).view(lines.shape)
    return (out.transpose(1, 2) if axis else out).reshape(x.shape)


def split_lines(x: Tensor, grid: tuple[int, int], axis: int) -> Tensor:
    """[b, rows * columns, d] -> [b, lines, tokens of a line, d]; a line is a row (axis 0) or a column (1)."""
    image = x.view(x.shape[0], *grid, x.shape[2])  # not len(x), which ONNX export would make a constant
    return image.transpose(1, 2) if axis else image
