"""LoRA beside peft's, and against the formula: what it computes, learns, and merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.vits import SMALL, contract_for, random_images, randomised, transformers
from vit_model import lora
from vit_model.config import LoRAOptions, ViTConfig
from vit_model.formats import hugging_face
from vit_model.model import ViT
from vit_model.parts import HEADS

CONFIG = ViTConfig.model_validate(SMALL)
ALL = ("query", "key", "value", "proj")
OPTIONS = LoRAOptions(rank=4, scale=0.5, targets=ALL)


def adapted(options: LoRAOptions, **fields: Any) -> ViT:
    """A ViT whose LoRA matrices are all different from zero."""
    model = randomised(ViTConfig.model_validate({**SMALL, **fields}))
    lora.add(model, options, seed=3)
    generator = torch.Generator().manual_seed(5)
    for attention in lora.attentions(model):
        for pair in lora.pairs(attention).values():
            nn.init.normal_(pair.up.weight, std=0.3, generator=generator)
    return model


def test_what_is_added_changes_nothing_before_the_first_step_and_depends_on_the_seed_alone() -> None:
    plain, model, again, other = (randomised(CONFIG) for _ in range(4))
    lora.add(model, OPTIONS, seed=3)
    torch.manual_seed(99)
    lora.add(again, OPTIONS, seed=3)
    lora.add(other, OPTIONS, seed=4)
    assert torch.equal(model(random_images(CONFIG)), plain(random_images(CONFIG)))
    matrices = {name: weight for name, weight in model.state_dict().items() if lora.is_adapter(name)}
    assert len(matrices) == CONFIG.depth * len(ALL) * 2
    down = torch.cat([weight.flatten() for name, weight in matrices.items() if "down" in name])
    bound = CONFIG.width**-0.5
    assert down.abs().max() <= bound and down.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in matrices.items())
    assert not torch.equal(matrices["blocks.0.attn.lora.key.down.weight"], other.blocks[0].attn.lora["key"].down.weight)


@pytest.mark.parametrize("targets", [("query", "value"), ("key",), ("proj",), ALL], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"pooling": "gap"}, {"axial": True, "pooling": "gap"}, {"position": "relative"}, {"position": "rope"}],
)
def test_the_merged_model_is_an_ordinary_one_that_computes_the_same(fields: dict[str, Any], targets: Any) -> None:
    """Queries of the class token alone, of all tokens, and of rows and columns."""
    model = adapted(OPTIONS.model_copy(update={"targets": targets}), **fields).double()
    ordinary = randomised(model.config).double()
    before = model(random_images(model.config).double())
    lora.merge(model)
    assert model.state_dict().keys() == ordinary.state_dict().keys()
    torch.testing.assert_close(model(random_images(model.config).double()), before, rtol=1e-12, atol=1e-12)
    changed = {
        name for name, weight in model.state_dict().items() if not torch.equal(weight, ordinary.state_dict()[name])
    }
    kinds = {"attn.proj.weight" if target == "proj" else "attn.qkv.weight" for target in targets}
    assert changed == {f"blocks.{block}.{kind}" for block in range(model.config.num_blocks) for kind in kinds}


def test_dropout_acts_in_training_alone() -> None:
    model = adapted(OPTIONS.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model.train()(random_images(CONFIG)), model(random_images(CONFIG)))
    assert torch.equal(model.eval()(random_images(CONFIG)), adapted(OPTIONS).eval()(random_images(CONFIG)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_training_steps_change_the_same_weights_as_pefts(tmp_path: Path) -> None:
    """Five steps of AdamW from the same matrices; then both merge."""
    peft = pytest.importorskip("peft")
    ours = randomised(CONFIG)
    hugging_face.write(tmp_path / "ours", ours, contract_for(CONFIG))
    theirs = transformers().ViTForImageClassification.from_pretrained(tmp_path / "ours")
    settings = LoRAOptions(rank=4, scale=2.0)
    lora.add(ours, settings, seed=0)
    theirs = peft.get_peft_model(
        theirs,
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["classifier"],
            lora_dropout=0.0,
        ),
    )
    matrices = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        weight.requires_grad_(lora.is_adapter(name) or name.startswith(HEADS))
        if ".lora." in name:
            _, block, _, _, target, side, _ = name.split(".")
            letter = {"down": "A", "up": "B"}[side]
            matrices[
                f"base_model.model.vit.layers.{block}.attention.{target[0]}_proj.lora_{letter}.default.weight"
            ].data.copy_(weight)
    counts = [sum(w.numel() for w in model.parameters() if w.requires_grad) for model in (ours, theirs)]
    assert counts[0] == counts[1] == CONFIG.depth * 2 * 2 * 4 * CONFIG.width + (CONFIG.width + 1) * 7
    labels = torch.tensor([0, 1, 2, 3])
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2, weight_decay=0.1)
        for _ in range(5):
            logits = model(random_images(CONFIG, 4))
            loss = nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    lora.merge(ours)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = hugging_face.read(tmp_path / "merged").weights
    torch.testing.assert_close({**ours.state_dict()}, merged, rtol=1e-4, atol=1e-5)
