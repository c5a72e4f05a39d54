"""How a site is seen: hooks on its module.

A hook asks one Python bool, whether this step is sampled. Run eagerly it reads what is there and
changes nothing. Traced by torch.compile the bool is a guard: one graph without anything of this for
the steps between, and one for sampled steps, in which `tap` copies the output of the site, so that
no compiler drops it, and its backward copies the gradient. Both look at operands when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from lokakern.nn.module_scan import Joined, has_buffers, weight_of
from lokakern.probe.hooks import Recorder, is_backward_under_way, is_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPE_WORDS = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class _Tap(torch.autograd.Function):
    """The output of a site, as it was; both passes are looked at."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor | None, site: int, has_gradient: bool
    ) -> Tensor:
        copy, call = torch.ops.lokakern.probe_tap(y, x, weight, site, has_gradient)
        ctx.save_for_backward(call)
        ctx.site = site
        return copy  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (call,) = ctx.saved_tensors
        found = torch.ops.lokakern.probe_tap_gradient(gradients[0], call, ctx.site)
        return found, None, None, None, None


def _is_at_hand(x: Tensor) -> bool:
    """Whether it holds numbers: not within torch.func, and not faked."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped


def _is_exported_or_transformed() -> bool:
    """Whether what is traced is to run elsewhere, or within torch.func, where taps have no rule.

    Asked while it is traced (`hook_of`), not when it runs.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    return is_transformed or torch.compiler.is_exporting()


class Hook:
    """A hook of a module, of which a copy of the module has nothing.

    A copy or a pickled one calls no function, and leaves the module when that is called first.

    Args:
        function: What is called; None of a copy.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, module: torch.nn.Module, *args: Any) -> Any:
        if self._function is not None:
            return self._function(module, *args)
        if not torch.compiler.is_compiling():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if hook is self]:
                    del hooks[key]
                    module._forward_hooks_with_kwargs.pop(key, None)
        return None

    def __deepcopy__(self, _memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


def hook_of(
    recorder: Recorder,
    seen: Callable[[Recorder, Tensor], None],
    seen_gradient: Callable[[], None],
) -> Hook:
    """A forward hook that shows a module's call to a recorder.

    Args:
        recorder: Of the site.
        seen: Told of outputs in eager code, to see what comes after them.
        seen_gradient: Called in a backward pass that comes to such an output.
    """
    switch, number = recorder.switch, recorder.number
    torch.compiler.assume_constant_result(_is_exported_or_transformed)  # type: ignore[no-untyped-call]

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        if not switch.on:
            return None
        if not isinstance(module, Joined):
            return look_at(module, args, kwargs, y)
        if torch.compiler.is_compiling() and _is_exported_or_transformed():
            return None
        if not all(map(is_plain, y)):
            recorder.unseen = "its outputs are no plain tensors"
            return None
        # All columns of the product together, as copies: gradients come to parts of the whole.
        whole = torch.cat(y, -1)
        tapped = look_at(module, args, kwargs, whole)
        whole = whole if tapped is None else tapped
        return whole.split([part.shape[-1] for part in y], -1)

    def look_at(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        is_compiling = torch.compiler.is_compiling()
        if (
            not is_plain(x)
            or not is_plain(y)
            or x.dtype not in DTYPES
            or y.dtype not in DTYPES
            or not (is_compiling or _is_at_hand(x))
        ):
            if not is_compiling:
                recorder.unseen = f"its input or its output is no plain tensor of {_DTYPE_WORDS}"
            return None
        if getattr(module, "_is_replica", False):
            recorder.unseen = "nn.DataParallel runs copies of it; use DistributedDataParallel"
            return None
        weight: Any = None
        # A parametrized one is made when it is asked for, and with buffers not in a graph.
        is_due = not has_buffers(module) if is_compiling else switch.weights or recorder.check
        if is_due:
            weight = weight if is_plain(weight := weight_of(module)) else None
        has_gradient = torch.is_grad_enabled() and y.requires_grad
        if is_compiling:
            if _is_exported_or_transformed():
                return None
            return _Tap.apply(y, x, weight, number, has_gradient)  # type: ignore[no-untyped-call]
        if is_backward_under_way():
            sample = recorder.sample_of_rerun(y) if has_gradient else None
        else:
            sample = recorder.forward(x, weight, y, has_gradient)
            if sample is not None:
                seen(recorder, y)
        if sample is not None and has_gradient:

            def look(gradient: Tensor) -> None:
                seen_gradient()
                recorder.backward(sample, gradient)

            y.register_hook(look)  # type: ignore[no-untyped-call]
        return None

    return Hook(hook)


def hook_of_gradient(recorder: Recorder) -> Callable[[Tensor], None]:
    """A hook of a parameter that is a site's weight; what is saved of the parameter lacks it."""

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(gradient: Tensor) -> None:
        recorder.weight_gradient(gradient)

    return hook  # type: ignore[no-any-return]
