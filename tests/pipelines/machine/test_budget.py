"""The estimated time of trainings, in words."""

from pathlib import Path

import pytest

from pipelines.machine.budget import Fits, _between, estimate, estimate_unmeasured, this_machine
from pipelines.machine.init import CPU_CHOICES, GPU_CHOICES, Choice
from pipelines.spec import ModelSize, Pretrain
from vit_model import compute
from vit_model.config import MaeOptions


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (30.0, 50.0, "1 minute"),
        (300.0, 5400.0, "5 to 90 minutes"),
        (5400.0, 9000.0, "1.5 to 2.5 hours"),
        (7_562_783_880.0, 31_898_595_960.0, "2,100,773 to 8,860,721 hours"),
    ],
)
def test_the_unit_and_its_digits_suit_the_time(least: float, most: float, words: str) -> None:
    assert _between(least, most) == words


def test_a_masked_autoencoder_takes_as_long_as_its_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of a fine-tuning is scaled; `plan`, which reads the stage, estimates what `init` did."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    size, machine = ModelSize(patch_size=8, width=128, depth=6, num_heads=4), this_machine()
    stage = Pretrain(
        job="pretrain",
        data="images",
        objective="mae",
        model=size,
        resolution=64,
        steps=1000,
        batch_size=64,
        learning_rate=1e-3,
    )
    architecture, authors = size.architecture(64, 3, 0), MaeOptions()
    decoder = Choice(64, size, 64, 1000).decoder()
    said = {}
    for mae in (None, decoder, authors):
        ratio = compute.train_flops(architecture, mae) / compute.train_flops(architecture)
        fits = Fits(architecture, 0, stage.steps, stage.batch_size, stage.dtype, mae)
        assert fits.flops == 64_000 * compute.train_flops(architecture, mae)
        estimated = estimate([fits], machine, lambda *_: [(100.0, 100.0)])
        assert estimated is not None and f"{100 / ratio:,.3g} images/s" in estimated
        assert _between(640 * ratio + 20, 1.25 * 640 * ratio + 90) in estimated
        if mae is not None:
            planned = estimate_unmeasured({"vit": stage.model_copy(update={"mae": mae})})
            assert planned == f"{estimated}; vit 100% of the work"
        said[mae] = ratio
    assert "2 trainings of 1,000 steps of 64 images" in str(estimate([fits, fits], machine))
    assert "2 trainings, the smallest model" in str(estimate([fits, fits._replace(steps=10)], machine))
    assert said[decoder] < 1 < 10 < said[authors], "the authors' decoder is for larger encoders"


@pytest.mark.parametrize("choice", [*CPU_CHOICES, *GPU_CHOICES], ids=str)
def test_a_decoder_is_smaller_than_the_encoder_of_all_patches(choice: tuple[int, int, ModelSize]) -> None:
    _, resolution, size = choice
    encoder, mae = size.architecture(resolution, 3, 0), Choice(resolution, size, 64, 100).decoder()
    assert compute.forward_flops(encoder, mae) < compute.forward_flops(encoder)
    assert mae.decoder(encoder).num_parameters < encoder.num_parameters / 4
