"""The Vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929), in the order of the paper's equations.

In: a `ViTConfig` and images, float [b, c, height, width], normalised by `preprocessing.normalise`.
Out: logits [b, classes], or the tokens and the representation that every other stage uses.
Use: `model = ViT(config)`; `model.initialise(seed)`; `logits = model(images)`.

Letters in shapes: b batch, n tokens, d width, h heads, e width of a head (d / h), c channels, p patch size,
g patches a side.
The names of the parameters are timm's, so weights of others are renamed in few places.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.config import ViTConfig


class PatchEmbed(nn.Module):
    """Eq. 1, first part: cut the image into patches and map each to a token.

    A convolution whose stride is its kernel, done as one matrix product: `proj.weight` [d, c*p*p] is that
    kernel's [d, c, p, p] flattened.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.proj = nn.Linear(config.in_channels * config.patch_size**2, config.width)

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, g*p, g*p] -> [b, g*g, d], patches in raster order."""
        b, c, height, _ = images.shape
        p, g = self.patch_size, height // self.patch_size
        patches = images.reshape(b, c, g, p, g, p).permute(0, 2, 4, 1, 3, 5)  # [b, g, g, c, p, p]
        tokens: Tensor = self.proj(patches.reshape(b, g * g, c * p * p))
        return tokens


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query key^T / sqrt(e)) value for [b, h, n, e] (eq. 5-7), by whichever way is faster here.

    SDPA's bf16 backward is slow on CPUs. Forward and backward, one thread of an AMD EPYC with AVX-512 bf16,
    torch 2.13, b 128, n 17, h 4, e 16: bf16 SDPA 26 ms, plain 1.5 ms (2.4 ms with a bf16 softmax); fp32 SDPA
    2.1 ms, plain 1.8 ms. With b 8, n 197, h 3, e 64: bf16 13 ms and 5.6 ms, fp32 11 ms either way.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        return plain_attention(query, key, value)
    return F.scaled_dot_product_attention(query, key, value)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, as two matrix products around a float32 softmax. Same shapes as `attention`."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    out: Tensor = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return out


class Attention(nn.Module):
    """Multi-head self-attention (appendix A). `qkv` stacks the query, key and value matrices."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, d // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [b, h, n, e]
        heads = attention(query, key, value).transpose(1, 2).reshape(b, n, d)
        out: Tensor = self.dropout(self.proj(heads))
        return out


class Mlp(nn.Module):
    """Two linear layers around a GELU; dropout after each but the last addition (section B.1)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_dim)
        self.act = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.fc2 = nn.Linear(config.mlp_dim, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        hidden = self.dropout(self.act(self.fc1(x)))
        out: Tensor = self.dropout(self.fc2(hidden))
        return out


class Block(nn.Module):
    """Eq. 2 and 3: attention, then the MLP, each behind a layer norm and beside a residual connection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(nn.Module):
    """The encoder and its head. Built on torch's default device with the weights of `initialise(seed=0)`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        # On "meta" first: torch's own initialisation would be wasted, and would move the global generator.
        with torch.device("meta"):
            self.patch_embed = PatchEmbed(config)
            if config.pooling == "cls":
                self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
            self.pos_embed = nn.Parameter(torch.empty(1, config.num_tokens, config.width))
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
            self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
            if config.representation_head:
                self.pre_logits = nn.Linear(config.width, config.width)
            if config.num_classes:
                self.head = nn.Linear(config.width, config.num_classes)
        self.to_empty(device=device)
        if device.type != "meta":
            self.initialise(seed=0)

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, height, width] -> logits [b, classes]; the representation [b, d] when there is no head."""
        representation = self.forward_features(images)[1]
        if not self.config.num_classes:
            return representation
        logits: Tensor = self.head(representation)
        return logits

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[b, c, height, width] -> tokens [b, n, d] after the final norm, representation y [b, d] (eq. 4).

        y is the class token, or with pooling "gap" the mean of all tokens; then the tanh layer, if any.
        Raises ValueError for images of another size than the configuration's.
        """
        c, size = self.config.in_channels, self.config.image_size
        if images.shape[1:] != (c, size, size):
            raise ValueError(
                f"images have shape {list(images.shape)}; this model needs [b, {c}, {size}, {size}]"
            )
        x = self.patch_embed(images)
        if self.config.pooling == "cls":
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        tokens = self.norm(x)
        y = tokens[:, 0] if self.config.pooling == "cls" else tokens.mean(dim=1)
        if self.config.representation_head:
            y = torch.tanh(self.pre_logits(y))
        return tokens, y

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew, as the authors' JAX code does (vision_transformer, models_vit.py).

        | parameter                           | distribution                                        |
        |-------------------------------------|-----------------------------------------------------|
        | patch_embed.proj.weight             | LeCun normal: variance 1 / fan-in, cut at 2 std     |
        | pre_logits.weight                   | the same                                            |
        | pos_embed                           | normal, std 0.02                                    |
        | query, key, value; attn.proj.weight | uniform within sqrt(6 / 2d): Xavier, each as [d, d] |
        | mlp.fc1.weight, mlp.fc2.weight      | uniform within sqrt(6 / (d + mlp_dim)): Xavier      |
        | mlp.fc1.bias, mlp.fc2.bias          | normal, std 1e-6                                    |
        | norm1, norm2, norm                  | weight 1, bias 0                                    |
        | head                                | weight 0, bias `head_bias`                          |
        | cls_token and every other bias      | 0                                                   |

        The draws are made on the CPU in float32, so a seed means the same weights on every device.
        """
        width, mlp_dim = self.config.width, self.config.mlp_dim
        bounds = {
            "attn.qkv.weight": math.sqrt(6 / (2 * width)),
            "attn.proj.weight": math.sqrt(6 / (2 * width)),
            "mlp.fc1.weight": math.sqrt(6 / (width + mlp_dim)),
            "mlp.fc2.weight": math.sqrt(6 / (width + mlp_dim)),
        }
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            suffix = name.split(".", 2)[-1] if name.startswith("blocks.") else name
            if suffix in bounds:
                drawn.uniform_(-bounds[suffix], bounds[suffix], generator=generator)
            elif suffix in ("patch_embed.proj.weight", "pre_logits.weight"):
                # Cutting a normal at two standard deviations leaves 0.8796 of its spread.
                std = math.sqrt(1 / parameter.shape[1]) / 0.87962566103423978
                nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
            elif suffix == "pos_embed":
                drawn.normal_(std=0.02, generator=generator)
            elif suffix in ("mlp.fc1.bias", "mlp.fc2.bias"):
                drawn.normal_(std=1e-6, generator=generator)
            elif suffix in ("norm1.weight", "norm2.weight", "norm.weight"):
                drawn.fill_(1.0)
            elif suffix == "head.bias":
                drawn.fill_(self.config.head_bias)
            parameter.copy_(drawn)
