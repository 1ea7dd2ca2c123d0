"""Known-bad combinations: which a recipe meets, and what that means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.base.targets import load_target
from kitbuild.errors import RecipeError
from kitbuild.lock import requirements as needs
from kitbuild.lock.advisories import load_advisories, met_advisories
from kitbuild.lock.requirements import refuse_advisories, requirements
from kitbuild.recipe.models import Recipe
from tests.image.kit import make_kernel

if TYPE_CHECKING:
    from kitbuild.store import Store

GOOD = {"trl": "1.14.2", "transformers": "5.22.2", "kernels": "0.17.2"}
GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8}
FULL = {"num_attention_heads": 32, "num_key_value_heads": 32}


def recipe(**changes: Any) -> Recipe:
    fields = {
        "kitbuild": 1,
        "name": "test",
        "model": {"repo": "Qwen/Qwen3-8B"},
        "dataset": ({"repo": "trl-lib/Capybara"},),
        "image": {"cuda": "12.9"},
        "batch": {"global": 1, "micro": 1},
    }
    return Recipe.model_validate({**fields, **changes})


def met(asked: Recipe, versions: dict[str, str] | None = None, model: dict[str, Any] | None = None) -> list[str]:
    found = met_advisories(asked, versions={**GOOD, **(versions or {})}, model_config=model)
    return [advisory.id for advisory in found]


V3 = recipe(kernels={"attention": "kernels-community/flash-attn2@v3"})
OVERLAPPED = recipe(launch={"strategy": "deepspeed", "deepspeed": {"overlap_comm": True}})
FLCE = recipe(liger={"fused_linear_cross_entropy": True})


def test_the_list() -> None:
    """Every advisory has an id of its own, advice, and a source: an address, or a page of ours."""
    found = load_advisories()
    assert len({advisory.id for advisory in found}) == len(found)
    assert all(advisory.advice and advisory.source.startswith(("https://", "docs/")) for advisory in found)


@pytest.mark.parametrize(
    ("asked", "versions", "model", "expected"),
    [
        (V3, {}, GROUPED, ["KIT-2026-001"]),
        (V3, {}, FULL, []),
        (V3, {}, None, []),
        (V3, {}, {"num_attention_heads": 32}, []),
        (recipe(kernels={"attention": "kernels-community/flash-attn2@v2"}), {}, GROUPED, []),
        (recipe(kernels={"attention": "other/flash-attn2@v3"}), {}, GROUPED, []),
        (recipe(determinism={"mode": "strict", "virtual_ranks": 4}), {}, None, []),
        (recipe(image={"cuda": "cpu"}, determinism={"cpu_portable": True}), {}, None, []),
        (FLCE, {"trl": "1.15.0"}, None, ["KIT-2026-002", "KIT-2026-018"]),
        (FLCE, {"trl": "1.14.2"}, None, []),
        (recipe(liger={"rope": True}), {"trl": "1.15.0"}, None, ["KIT-2026-018"]),
        (recipe(), {"trl": "1.15.0"}, None, []),
        (recipe(), {"kernels": "0.17.1"}, None, ["KIT-2026-003"]),
        (recipe(), {"kernels": "0.18.0"}, None, ["KIT-2026-004"]),
        (recipe(), {"kernels": "0.18.2", "transformers": "5.23.0"}, None, []),
        (recipe(), {"kernels": "odd"}, None, []),
        (recipe(), {"transformers": "5.14.1", "kernels": "0.15.2", "huggingface-hub": "1.9"}, None, []),
        (recipe(), {"transformers": "5.17.0", "kernels": "0.16.2", "huggingface-hub": "1.33.0"}, None, []),
        (recipe(), {"transformers": "5.19.0", "kernels": "0.17.0", "huggingface-hub": "2.4.0"}, None, []),
        (recipe(), {"huggingface-hub": "2.4.0"}, None, []),
        (recipe(), {"torch": "2.10.0"}, None, []),
        (recipe(), {"torch": "2.11.0"}, None, ["KIT-2026-022"]),
        (recipe(image={"cuda": "cpu"}), {"torch": "2.13.0+cpu"}, None, []),
        (recipe(image={"cuda": "12.8", "gpu_archs": ("7.0", "9.0")}), {"torch": "2.10.0"}, None, []),
        (recipe(image={"cuda": "12.8", "gpu_archs": ("6.0",)}), {"torch": "2.7.1"}, None, []),
        (recipe(launch={"strategy": "deepspeed"}), {}, None, ["KIT-2026-023"]),
        (OVERLAPPED, {}, None, ["KIT-2026-023", "KIT-2026-028"]),
        (recipe(liger={"rope": True}), {"liger-kernel": "0.8.5"}, None, []),
        (recipe(liger={"rope": True}), {"liger-kernel": "0.8.5", "nvidia-cutlass-dsl": "4.3"}, None, ["KIT-2026-027"]),
        (recipe(), {}, {"quantization_config": {"quant_method": "bitsandbytes"}}, []),
        (recipe(), {}, {"quantization_config": "odd"}, []),
        (recipe(), {}, {"experts_implementation": "grouped_mm", "model_type": "qwen3"}, []),
    ],
)
def test_conditions(asked: Recipe, versions: dict[str, str], model: dict[str, Any] | None, expected: list[str]) -> None:
    """All conditions of an advisory hold or it is not met; what is not known meets none."""
    assert met(asked, versions, model) == expected


@pytest.mark.parametrize(
    ("number", "wheel", "expected"),
    [(2, "flash-attn", "KIT-2026-007"), (3, "flash-attn-3", "KIT-2026-008"), (4, "flash-attn-4", "KIT-2026-009")],
)
def test_each_attention_needs_its_own_wheel(number: int, wheel: str, expected: str) -> None:
    """The wheel of another version does not do."""
    asked = recipe(
        kernels={"attention": f"flash_attention_{number}"},
        image={"cuda": "12.9", "packages": {wheel: "1.0"}},
        model={"repo": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
    )
    assert met(asked) == [expected]
    others = {name: "1.0" for name in ("flash-attn", "flash-attn-3", "flash-attn-4") if name != wheel}
    assert met(asked, others) == [expected]
    assert met(asked, {wheel: "1.0"}) == []


def test_a_kernel_by_commit(store: Store) -> None:
    """A commit says nothing; the version in the build's metadata does, once it is locked."""
    asked = recipe(kernels={"attention": f"kernels-community/flash-attn2@{'c' * 40}"})
    versions = {"torch": "2.8.0"}
    for version, role, expected in ((3, "attention", ["KIT-2026-001"]), (2, "attention", []), (3, "layers", [])):
        fields = {"repo": "kernels-community/flash-attn2", "kernel_version": version, "role": role}
        kernel = make_kernel(store).model_copy(update=fields)
        found = met_advisories(asked, versions=versions, model_config=GROUPED, kernels=(kernel,))
        assert [advisory.id for advisory in found] == expected


def test_refusal() -> None:
    """An error-level advisory is exit 2: the combination, the advice and the source, under the advisory's id."""
    with pytest.raises(RecipeError) as caught:
        refuse_advisories(V3, versions=GOOD, model_config=GROUPED)
    (problem,) = caught.value.problems
    assert problem.key == "KIT-2026-001"
    assert problem.message.startswith("flash-attn2 v3 builds fail in the backward pass of grouped-query models")
    assert problem.hint == (
        "pin kernels-community/flash-attn2@v2, or a version after v3"
        " (https://github.com/huggingface/kernels-community/issues/1085)"
    )
    assert refuse_advisories(V3, versions=GOOD, model_config=FULL) == ()


@pytest.mark.parametrize("target", ["cpu", "cuda128", "cuda129"])
def test_the_tested_sets_meet_none(target: str) -> None:
    """No tested package set is itself a known-bad combination."""
    cuda = {"cpu": "cpu", "cuda128": "12.8", "cuda129": "12.9"}[target]
    asked = recipe(image={"cuda": cuda}, model={"repo": "Qwen/Qwen3-8B", "dtype": "bfloat16"})
    assert (
        refuse_advisories(asked, versions=needs.expected_versions(asked, load_target(target)), model_config=GROUPED)
        == ()
    )


def test_requirements() -> None:
    """The tested set, what the recipe uses of the optional ones, then the recipe's own versions, by canonical name."""
    cpu = load_target("cpu")
    assert "liger-kernel" not in requirements(recipe(image={"cuda": "cpu"}), cpu)
    assert requirements(recipe(image={"cuda": "cpu"}), cpu)["huggingface-hub"] == cpu.packages["huggingface_hub"]
    own = recipe(image={"cuda": "12.9", "packages": {"TRL": "1.13.0", "Flash_Attn": "2.8.3"}}, liger={"rope": True})
    wanted = requirements(own, load_target("cuda129"))
    assert (wanted["trl"], wanted["flash-attn"]) == ("1.13.0", "2.8.3")
    assert "deepspeed" not in wanted
    zero = recipe(launch={"strategy": "deepspeed", "processes_per_node": 1})
    assert requirements(zero, load_target("cuda129"))["deepspeed"] == "0.19.8"
