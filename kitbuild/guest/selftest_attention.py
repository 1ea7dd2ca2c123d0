"""Phase 3, attention: the kernel's own functions on rows that are full, padded and packed."""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RecipeError, RunError
from kitbuild.guest.selftest import ADVICE

if TYPE_CHECKING:
    from types import ModuleType

    from kitbuild.guest.config import Config, Kernel
    from kitbuild.guest.selftest import Selftest

DENSE, VARLEN = "flash_attn_func", "flash_attn_varlen_func"
# Lengths of documents. On a GPU they are longer than the blocks in which kernels work, and not their multiples.
LENGTHS = {
    "cpu": {"full": (33,), "padded": (33, 7), "packed": (5, 16, 12)},
    "cuda": {"full": (257,), "padded": (257, 65), "packed": (5, 128, 300, 79)},
}
NAMES = ("output", "query gradient", "key gradient", "value gradient")


def attention(test: Selftest, kernel: Kernel, module: ModuleType) -> None:
    """Each way in which the kernel is called in training; documents must not see each other."""
    functions = {name: getattr(module, name, None) for name in (DENSE, VARLEN)}
    if functions[VARLEN] is None:
        if functions[DENSE] is not None or kernel.member is None:
            found = ", ".join(sorted(name for name in vars(module) if not name.startswith("_"))[:8])
            text = f"kernel {kernel} has no {VARLEN}, which padded and packed rows need (it has {found or 'nothing'})"
            raise RunError(text, hint=ADVICE)
        return  # Called as transformers calls its own; tested in a layer of the model.
    for rows, lengths in LENGTHS[test.device].items():
        name = DENSE if rows == "full" and functions[DENSE] is not None else VARLEN
        case = Case(test, kernel, functions[name], name, rows)
        test.compare(kernel, case.named, case.run, case.reference(), NAMES)
        if len(lengths) > 1:
            case.isolated()


class Case:
    """One function on rows of some lengths, with random values from a generator of its own."""

    def __init__(self, test: Selftest, kernel: Kernel, function: Any, name: str, rows: str) -> None:
        import torch

        self.test, self.kernel, self.function = test, kernel, function
        self.lengths = LENGTHS[test.device][rows]
        self.dense = name == DENSE
        shape = test.shape
        heads = f"{shape['heads']} heads on {shape['kv_heads']}, width {shape['head_dim']}"
        self.named = f"{name} ({rows} rows, {heads})"
        self.generator = torch.Generator().manual_seed(0)
        self.copies = 2 if self.dense else 1
        self.grad, *inputs = (self.values(shape[key]) for key in ("heads", "heads", "kv_heads", "kv_heads"))
        self.inputs = [item.requires_grad_() for item in inputs]
        self.extra = extra(test.config, kernel, name, function)

    def values(self, heads: int) -> Any:
        """Random values in the model's type; on the CPU first, so that they are the same on each device."""
        import torch

        size = (self.copies, sum(self.lengths), heads, self.test.shape["head_dim"])
        return torch.randn(size, generator=self.generator).to(self.test.device, self.test.dtype)

    def forward(self, inputs: Any) -> Any:
        """The output, shaped as the rows are."""
        import torch

        if self.dense:
            out = self.function(*inputs, causal=True, **self.extra)
        else:
            bounds = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.test.device)
            flat, longest = [item.flatten(0, 1) for item in inputs], max(self.lengths)
            # By name, as transformers calls it: kernels order these differently.
            named = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
            out = self.function(*flat, **named, causal=True, **self.extra)
        return (out[0] if isinstance(out, tuple) else out).reshape(self.grad.shape)

    def run(self) -> list[Any]:
        """Output and gradients."""
        import torch

        out = self.forward(self.inputs)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)]

    def reference(self) -> list[Any]:
        """Attention by its definition, in fp32: causal, inside each document, query heads sharing key heads."""
        import torch

        wide = [item.detach().float().requires_grad_() for item in self.inputs]
        query, key, value = (item.transpose(1, 2) for item in wide)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        document = torch.cat([torch.full((size,), index) for index, size in enumerate(self.lengths)])
        document = document.to(self.test.device)
        seen = torch.ones(len(document), len(document), dtype=torch.bool, device=self.test.device).tril()
        seen &= document[:, None] == document[None, :]
        scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        out = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, wide, self.grad.float())]

    def isolated(self) -> None:
        """No bit of a document's output follows from another, and no gradient flows back into another."""
        import torch

        whole = self.forward(self.inputs).detach()
        end = 0
        for index, size in enumerate(self.lengths):
            begin, end = end, end + size
            inside = torch.zeros(sum(self.lengths), dtype=torch.bool, device=self.test.device)
            inside[begin:end] = True
            mask = inside[None, :, None, None]
            others = [torch.where(mask, item.detach(), self.values(item.shape[2])) for item in self.inputs]
            if not torch.equal(self.forward(others)[:, begin:end], whole[:, begin:end]):
                self._sees(f"the output of document {index + 1} changes with the others")
            grads = torch.autograd.grad(self.forward(self.inputs), self.inputs, self.grad * mask)
            if any(torch.count_nonzero(item[:, ~inside]) for item in grads):
                self._sees(f"a gradient of document {index + 1} flows into the others")
        self.test.passed(self.kernel, f"{self.named}: documents do not see each other", documents=len(self.lengths))

    def _sees(self, what: str) -> None:
        text = f"kernel {self.kernel} is wrong in {self.named}: documents see each other: {what}"
        raise RunError(text, hint=ADVICE)


def extra(config: Config, kernel: Kernel, name: str, function: Any) -> dict[str, bool]:
    """How strict asks for a deterministic backward; on a GPU a kernel that cannot be asked is refused (exit 2)."""
    if not config.strict:
        return {}
    if _takes(function, "deterministic"):
        return {"deterministic": True}
    if config.cuda:
        text = f"kernel {kernel}: {name} offers no deterministic backward"
        raise RecipeError(text, hint="another attention kernel, or determinism: record")
    return {}


def _takes(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
