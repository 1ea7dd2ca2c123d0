"""The Hub kernels that the locked transformers would load although no recipe names them: each is known and refused."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kitbuild.lock.advisories import load_advisories

# Where transformers asks the Hub for a kernel, and why no locked run gets there.
KNOWN = {
    "integrations/hub_kernels.py": "kernels.attention: a reference with its revision, else a name (KIT-2026-007 to 009)",
    "integrations/msa_attention.py": "kernels.attention: needs a reference, which names its revision",
    "utils/import_utils.py": "KIT-2026-007",
    "integrations/gguf/kernels.py": "weights are *.safetensors",
    "integrations/deepgemm.py": "KIT-2026-025",
    "integrations/sonicmoe.py": "KIT-2026-025",
    "integrations/eetq.py": "KIT-2026-024",
    "integrations/fbgemm_fp8.py": "KIT-2026-024",
    "integrations/finegrained_fp8.py": "KIT-2026-024",
    "integrations/metal_quantization.py": "KIT-2026-024",
    "integrations/mxfp4.py": "KIT-2026-024",
    "integrations/nvfp4.py": "KIT-2026-024",
    "models/mra/modeling_mra.py": "KIT-2026-026",
    "models/rwkv/modeling_rwkv.py": "KIT-2026-026",
    "models/sam3_video/modeling_sam3_video.py": "KIT-2026-026",
    "models/yoso/modeling_yoso.py": "KIT-2026-026",
}
_CALL = re.compile(r"(?<!def )\b(?:get_kernel|lazy_load_kernel)\(")


@pytest.fixture(scope="module")
def transformers() -> Path:
    """The source of the locked transformers."""
    code = "import importlib.util; print(importlib.util.find_spec('transformers').origin)"
    python = os.environ["KITBUILD_TRAIN_PYTHON"]
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parent


def test_every_place_is_known(transformers: Path) -> None:
    """No module of the tested transformers asks for a kernel that is not in the table above."""
    found = {
        path.relative_to(transformers).as_posix()
        for path in transformers.rglob("*.py")
        if _CALL.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(KNOWN)


def test_models_do_not_ask_by_themselves(transformers: Path) -> None:
    """Layers are replaced by Hub kernels only where `use_kernels` is given, which the guest does not."""
    text = (transformers / "modeling_utils.py").read_text(encoding="utf-8")
    assert 'use_kernels = kwargs.pop("use_kernels", False)' in text


def test_the_reasons_are_advisories() -> None:
    """Each id in the table is one that refuses."""
    refusing = {item.id for item in load_advisories() if item.severity == "error"}
    named = {number for reason in KNOWN.values() for number in re.findall(r"KIT-\d{4}-\d{3}", reason)}
    assert named <= refusing


def test_quantizers_that_have_a_kernel_are_refused(transformers: Path) -> None:
    """Every way to quantize whose module asks for a kernel is in the advisory."""
    (advisory,) = [item for item in load_advisories() if item.id == "KIT-2026-024"]
    methods = {"finegrained_fp8": "fp8", "metal_quantization": "metal"}
    asking = [Path(place).stem for place, reason in KNOWN.items() if reason == advisory.id]
    assert all((transformers / "integrations" / f"{stem}.py").is_file() for stem in asking)
    expected = sorted(methods.get(stem, stem) for stem in asking)
    assert sorted(advisory.when.model["quantization_config.quant_method"]) == expected
