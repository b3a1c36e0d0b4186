"""A key changes with everything that changes the result, and with nothing else."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipelines import identity
from pipelines.files.hashing import cache_folder
from pipelines.recipe.load import load_pipeline
from pipelines.spec import (
    STAGE_TYPES,
    AnyStage,
    Finetune,
    FolderSource,
    HfParquetSource,
    Import,
    Ingest,
    Model,
    ModelSize,
    RecipeError,
    ResNetSize,
    module,
)
from tests.support.paths import TINY
from vit_model.fields import Frozen, marks

IMPORTED = {"imported": Import(job="import", path="/x", preprocessing="imagenet")}
STAGES = load_pipeline(str(TINY)).stages | load_pipeline("quickstart").stages | IMPORTED
OTHER: dict[type, Any] = {
    int: lambda v: v + 1,
    float: lambda v: v / 2 + 0.07,
    bool: lambda v: not v,
    str: lambda v: v + "x",
}


def key(stage: AnyStage) -> str:
    inputs = {field: ["d" * 64 for _ in names] for field, names in stage.inputs().items()}
    return identity.stage_key(stage, inputs, "s" * 64 if isinstance(stage, Ingest | Import) else None)


def leaves(config: Frozen, path: tuple[str, ...] = (), inherited: bool = False) -> Any:
    """(path, value, is execution) of every field of a stage, nested models included."""
    for name, info in type(config).model_fields.items():
        value, is_execution = getattr(config, name), inherited or bool(marks(info).get("execution"))
        if isinstance(value, Frozen):
            yield from leaves(value, (*path, name), is_execution)
        elif "input" not in marks(info):
            yield (*path, name), value, is_execution


def with_leaf(config: Frozen, path: tuple[str, ...], value: Any) -> Any:
    """A copy without validation: what is tested is the key, not which values are allowed."""
    name, *rest = path
    return config.model_copy(update={name: with_leaf(getattr(config, name), tuple(rest), value) if rest else value})


@pytest.mark.parametrize("name", STAGES)
def test_each_identity_field_changes_the_key_and_no_execution_field_does(name: str) -> None:
    stage = STAGES[name]
    for path, value, is_execution in leaves(stage):
        if path == ("job",):
            continue
        other = OTHER[type(value)](value) if type(value) in OTHER else (*value, *value[:1]) if value else "other"
        assert (key(with_leaf(stage, path, other)) == key(stage)) is is_execution, path


@pytest.mark.parametrize("name", STAGES)
def test_inputs_and_version_change_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = STAGES[name]
    before = key(stage)
    for field in stage.inputs():
        inputs = {f: ["d" * 64 for _ in n] for f, n in stage.inputs().items()}
        inputs[field] = ["e" * 64, *inputs[field][1:]]
        assert identity.stage_key(stage, inputs, None) != before
    monkeypatch.setattr(type(stage), "VERSION", type(stage).VERSION + 1)
    assert key(stage) != before


def test_renaming_stages_does_not_change_keys() -> None:
    stage = STAGES_TINY["finetune"]
    assert key(stage.model_copy(update={"data": "images", "backbone": "first"})) == key(stage)


STAGES_TINY = load_pipeline(str(TINY)).stages


@pytest.mark.parametrize("name", ["probe", "finetune"])
def test_a_checkpoint_that_is_not_the_last_enters_the_key(name: str) -> None:
    def at(checkpoint: str) -> str:
        settings = ("pretrain.keep_steps=[5, 10]", f"{name}.backbone.checkpoint={checkpoint}")
        return key(load_pipeline(str(TINY), settings).stages[name])

    assert at("last") == key(STAGES_TINY[name])
    assert len({at(checkpoint) for checkpoint in ("last", "best", "step:5", "step:10", "step:20")}) == 5


def test_each_part_of_a_searched_range_enters_the_key() -> None:
    def over(**values: float | str) -> str:
        setting = {"kind": "random", "trials": 3, "over": {"learning_rate": values}}
        settings = ("finetune.learning_rates=[]", f"finetune.search={setting}")
        return key(load_pipeline(str(TINY), settings).stages["finetune"])

    searched = [
        over(low=0.001, high=0.1),
        over(low=0.002, high=0.1),
        over(low=0.001, high=0.2),
        over(low=0.001, high=0.1, scale="log"),
    ]
    assert len({*searched}) == 4
    assert over(low=0.001, high=0.1, scale="linear") == searched[0]


def test_a_key_is_what_is_documented() -> None:
    """Built here from the formula alone, so that no default key ever moves unseen."""
    made_of = {
        "job": "evaluate",
        "version": STAGES_TINY["probe"].VERSION,
        "fields": {"job": "evaluate", "shots": [1, 5], "draws": 2, "seed": 0},
        "inputs": {"data": ["d" * 64], "backbone": ["d" * 64]},
        "source": None,
    }

    def sha256(value: Any) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    stage = STAGES_TINY["probe"]
    assert key(stage) == sha256(made_of)
    assert identity.stage_key(stage, made_of["inputs"], None, code="c" * 64) == sha256(made_of | {"code": "c" * 64}), (
        "--strict-code"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", Path("x"), {1: 2}, object()])
def test_values_without_one_spelling_are_an_error(value: Any) -> None:
    with pytest.raises(TypeError):
        identity.canonical_json({"a": [value]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.dictionaries(st.text(), json_values))
def test_canonical_json_does_not_depend_on_order_and_is_json(value: dict[str, Any]) -> None:
    shuffled = dict(reversed(list(value.items())))
    assert identity.canonical_json(value) == identity.canonical_json(shuffled)
    assert json.loads(identity.canonical_json(value)) == value


# ------------------------------------------------------------------------------------------------- sources


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "images"
    for name in ("a/1.png", "b/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def fingerprint(root: Path) -> str:
    return identity.source_fingerprint(
        Ingest.model_validate({"job": "ingest", "source": {"kind": "folder", "root": str(root)}})
    )


def test_fingerprint_follows_names_and_contents_and_nothing_else(images: Path, tmp_path: Path) -> None:
    first = fingerprint(images)
    os.utime(images / "a/1.png", (1, 1))
    (images / ".git").mkdir()
    (images / ".git" / "HEAD").write_text("x")
    assert fingerprint(images) == first, "a touch and what is hidden change nothing"
    moved = images.rename(tmp_path / "moved")
    assert fingerprint(moved) == first, "where it lies does not matter"
    (moved / "a/1.png").write_bytes(b"other")
    assert (second := fingerprint(moved)) != first
    (moved / "a/1.png").rename(moved / "a/3.png")
    assert fingerprint(moved) not in (first, second)


def test_a_damaged_cache_of_digests_changes_nothing(images: Path) -> None:
    first = fingerprint(images)
    (cache_folder() / "file-digests.json").write_text("{ damaged")
    assert fingerprint(images) == first


def test_missing_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        fingerprint(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------- code


@pytest.mark.slow
@pytest.mark.parametrize("job", STAGE_TYPES)
def test_import_closure_is_what_python_imports(job: str) -> None:
    """The static closure covers every module of ours that importing the stage loads."""
    code = (
        f"import sys, ray_jobs.{module(job)}\n"
        "for module in list(sys.modules.values()): print(getattr(module, '__file__', None))"
    )
    run = [sys.executable, "-W", "ignore", "-c", code]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    loaded = {Path(line) for line in printed.splitlines() if Path(line).is_relative_to(identity.PROJECT)}
    names = {path.relative_to(identity.PROJECT).as_posix() for path in loaded}
    names = {name for name in names if name.startswith(("pipelines/", "ray_jobs/", "vit_model/"))}
    # What moves records, jobs and temporary files decides no value; whatever else a stage loads is in its digest.
    moves = (
        "pipelines/store/",
        "pipelines/environment.py",
        "pipelines/errors.py",
        "pipelines/scratch.py",
        "pipelines/identity/",
    )
    closure = set(identity.import_closure(job))
    left_out = {name for name in names - closure if Path(name).name != "__init__.py"}
    assert names & closure
    assert {name for name in left_out if not name.startswith(moves)} == set()


@pytest.mark.parametrize("name", [name for name in identity.import_closure("report") if name.startswith("pipelines/")])
def test_every_function_that_computes_values_is_in_the_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another constant in what any function of the file returns is another digest of every stage."""
    source = identity.code._source
    tree = ast.parse(source(name)[0])
    before = identity.code_digest("report")
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            was, node.value = node.value, ast.Tuple([node.value, ast.Constant(2)])
            text = ast.unparse(tree)
            monkeypatch.setattr(
                identity.code,
                "_source",
                lambda file, text=text: (text, identity.sha256(text)) if file == name else source(file),
            )
            assert identity.code_digest.__wrapped__("report") != before, ast.unparse(node)
            node.value = was


def test_the_form_of_code_is_what_it_says() -> None:
    """Comments, layout, docstrings, descriptions and versions are not in it; everything else is."""
    code = '''
class Stage:
    """A stage."""
    VERSION: ClassVar[int] = 6
    steps: int = Field(1, ge=1, description="of all workers")
    def warmup(self):
        return f"{self.steps:>{4}} a" "b"  # why
'''
    same = '''
class Stage:
    """Another docstring."""
    VERSION: ClassVar[int] = 7
    steps: int = Field(
        1, ge=1, description="over all workers"
    )

    def warmup(self):
        "a docstring"
        return f"{self.steps:>{4}} ab"
'''
    form = identity.code_form(code)
    assert identity.code_form(same) == form
    changes = [
        ("ge=1", "ge=2"),
        (" ab", " a"),
        ("{4}", "{5}"),
        ("steps: int", "steps: float"),
        ("Field(", "field("),
    ]
    for old, new in changes:
        assert old in same
        assert identity.code_form(same.replace(old, new)) != form, old
    # as CPython 3.11, 3.12, 3.13 and 3.14 give it
    assert identity.sha256(form).startswith("eb9eec8f8cd264ce")


SIZES = {"patch_size": 4, "width": 64, "depth": 4, "num_heads": 4}


def test_options_that_came_later_leave_the_keys_of_what_was_made_before() -> None:
    """What the first version of a model's shape had is all that enters a key, until an option is used."""
    first = {*SIZES, "mlp_ratio", "pooling", "gelu"}
    assert identity.identity_fields(ModelSize.model_validate(SIZES)).keys() == first
    used = ModelSize.model_validate(SIZES | {"pooling": "gap", "registers": 2})
    assert identity.identity_fields(used).keys() == {*first, "registers"}


# The least that a recipe says of each stage, and which fields are in its key then: those of the first version.
FIRST = {
    "ingest": ({"source": {"kind": "digits"}}, "source max_bad_fraction"),
    "import": ({"path": "/x"}, "preprocessing"),
    "pretrain": (
        {"data": "d", "model": SIZES, "resolution": 8, "steps": 1, "batch_size": 1, "learning_rate": 1.0},
        "model resolution steps batch_size learning_rate optimizer augment label_smoothing dtype zero_stage seed",
    ),
    "finetune": (
        {"data": "d", "backbone": "b", "learning_rates": [1.0], "steps": 1, "batch_size": 1},
        "model resolution labels learning_rates steps batch_size optimizer augment label_smoothing dtype seed",
    ),
    "detect": (
        {"data": "d", "backbone": "b", "learning_rates": [1.0], "steps": 1, "batch_size": 1},
        "model resolution labels learning_rates steps batch_size optimizer augment label_smoothing dtype seed"
        " channels convs scales",
    ),
    "evaluate": ({"data": "d", "backbone": "b"}, "shots draws seed"),
    "segment": ({"data": "d", "backbone": "b"}, "seed"),
    "baselines": ({"data": "d"}, "methods labels thumbnail max_images"),
    "audit": ({"data": "d", "backbone": "b"}, "cross_validation seed"),
    "embed": ({"data": "d", "backbone": "b"}, "splits"),
    "predict": ({"data": "d", "backbone": "b"}, "splits"),
    "inspect": ({"data": "d", "backbone": "b"}, "split images seed"),
    "promote": (
        {"data": "d", "candidate": "c", "against": "@production", "floor": 0.5},
        "against max_loss floor anchor max_total_loss",
    ),
    "report": ({"title": "t", "of": ["d"]}, "title note of"),
}


@pytest.mark.parametrize("job", STAGE_TYPES)
def test_fields_that_came_later_are_not_in_the_key_of_a_stage_that_does_not_use_them(job: str) -> None:
    least, first = FIRST[job]
    stage = STAGE_TYPES[job].model_validate({"job": job} | least)
    assert identity.identity_fields(stage).keys() == {"job", *first.split()}


def test_columns_that_a_source_may_name_since_later_are_not_in_its_key() -> None:
    for kind in ({"kind": "shapes"}, {"kind": "vtab", "task": "oxford_iiit_pet", "root": "/x"}):
        fields = Ingest.model_validate({"job": "ingest", "source": kind}).source
        assert "masks" not in identity.identity_fields(fields)
    folder = FolderSource(kind="folder", root="/x")
    assert identity.identity_fields(folder).keys() == {"kind", "name", "salt"}
    parquet = HfParquetSource(kind="hf_parquet", root="/x")
    assert identity.identity_fields(parquet).keys() == {"kind", "name", "image", "label", "salt"}


def test_only_stages_with_stochastic_depth_got_new_keys_when_it_was_drawn_per_sample() -> None:
    shape = {"model": ModelSize.model_validate("Ti/16"), "backbone": None, "resolution": 32}
    for stage, version in (
        (STAGES_TINY["pretrain"], 6),
        (STAGES_TINY["finetune"].model_copy(update=shape), 7),
    ):
        with_it = with_leaf(stage, ("model", "stochastic_depth"), 0.1)
        assert (stage.version, with_it.version) == (version - 1, version)
    assert STAGES_TINY["finetune"].version == 6, "a backbone with it has another digest"


def test_only_searches_by_optuna_got_new_keys_when_they_tried_no_point_twice() -> None:
    search = {"trials": 2, "over": {"mixup": [0.0, 0.2]}}
    versions = {
        kind: Finetune.model_validate(
            STAGES_TINY["finetune"].model_dump() | {"search": search | {"kind": kind}}
        ).version
        for kind in ("random", "optuna")
    }
    assert versions == {"random": 6, "optuna": 8}


def test_a_models_name_stands_for_its_sizes() -> None:
    named = identity.identity_fields(ModelSize.model_validate("Ti/16"))
    spelled = ModelSize(patch_size=16, width=192, depth=12, num_heads=3)
    assert named == identity.identity_fields(spelled)
    assert identity.identity_fields(ModelSize.model_validate("R50+B/16"))["stem"] == (3, 4, 9)


def test_the_family_of_a_model_is_told_by_its_name_or_field_and_a_vit_needs_none() -> None:
    model: TypeAdapter[Any] = TypeAdapter(Model)
    plain = identity.identity_fields(model.validate_python(SIZES))
    assert "family" not in plain
    assert identity.identity_fields(model.validate_python(SIZES | {"family": "vit"})) == plain
    resnet = model.validate_python("R101x3")
    assert resnet == ResNetSize(units=(3, 4, 23, 3), width_factor=3)
    written = {"family": "resnet", "units": [3, 4, 23, 3], "width_factor": 3}
    assert model.validate_python(written) == resnet
    assert identity.identity_fields(resnet)["family"] == "resnet"
    assert isinstance(model.validate_python("R50+B/16"), ModelSize)
    for config in (resnet, model.validate_python("R26+S/32")):
        assert model.validate_json(config.model_dump_json()) == config
