"""A call's life cycle, once for all operations.

A subclass of `Operation` describes tensors and options, their checks, the launch for a new signature, and the
definition that runs without a kernel. This module derives the rest: the warm call (one C call), the first call, errors,
the refusal of gradients, and the op with fake and overload. Invariant: a call whose options and signature are known has
passed all checks, since the signature holds every tensor property that a check reads.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import is_grad_enabled
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from deep_tile import _launcher, launches, ops, tensors
from deep_tile.kinds import Kind
from deep_tile.ops import is_traced, passes_gradients
from deep_tile.options import check as check_options
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction

OPERATIONS: "dict[str, Operation]" = {}
"""Operations of imported modules, by name."""

_AD = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
"""forward_ad, whose `_current_level` is at least 0 in forward mode. The attribute is private: without it, no check."""

_TRANSFORMS = eager_transforms if hasattr(eager_transforms, "JVP_NESTING") else SimpleNamespace(JVP_NESTING=0)
"""torch.func, whose `JVP_NESTING` counts its transforms of that name, likewise."""

Given = tuple[torch.Tensor | None, ...]
"""A call's tensors, in the order of the overload `out`. None: not given, or not allocated yet."""


class Operation(ops.Op):
    """A public function and its op.

    Args:
        name, tensors, keywords: as for `ops.Op`. `tensors` are those of a launch, too, in this order; what is written
            to lies side by side.
        sources: which function makes the tensor with this name, for errors.
        to_train: the sentence that tells where to get a gradient, which the operation lacks.
        gradient_of: names of tensors that must not require a gradient; for others it is dropped. None: all.
        lists: names of further 1-D tensors, which may be None; keywords of the op.
        scratch: names of tensors behind these that `allocated` makes for kernels alone; a call has None there.
        called: the function's name, if the op's differs.
        how: as for `ops.Op`.

    Attributes:
        Options: the NamedTuple for a call's keywords. Calls pass a plain tuple, which is faster to build.
        launches: this operation's launch cache, by options and signature.
        names: the tensors' names.
        groupings: for a product, the supported names in `kinds.GROUPINGS`. A product also has `dtypes`, those of `a`.
    """

    Options: type
    groupings: tuple[str, ...] = ()
    is_on_gpu = staticmethod(attrgetter("is_cuda"))

    def __init__(
        self,
        name: str,
        tensors: str,
        keywords: str,
        *,
        sources: Mapping[str, str] = MappingProxyType({}),
        to_train: str = "",
        gradient_of: tuple[str, ...] | None = None,
        lists: str = "",
        scratch: str = "",
        called: str = "",
        **how,
    ) -> None:
        self.launches: launches.Table = {}
        self.lists, self.scratch, self.called = (*lists.split(),), (*scratch.split(),), called or name
        self.names = (*(tensor.rstrip("!?") for tensor in tensors.split()), *self.lists, *self.scratch)
        self.sources, self.to_train, self.gradient_of = sources, to_train, gradient_of or self.names
        super().__init__(name, tensors, keywords, self._run_op, self._check_op, self._fake, **how)
        OPERATIONS[name] = self
        self._first_out, self._last_out, self._has_one_out = self._outs[0], self._outs[-1], len(self._outs) == 1
        self._written_to = slice(self._first_out, self._last_out + 1)
        of_op = (*self._inputs, *self._outs)
        self._order = sorted(range(len(of_op)), key=of_op.__getitem__)
        self._no_scratch = (None,) * len(self.scratch)
        self._may_lack = {i for i, tensor in enumerate(self._tensors) if tensor.endswith("?")}
        self._may_lack |= {*self._outs} if self._allocates else set()
        self._may_lack |= {*range(len(self._tensors), len(self.names))}

    # To be described by subclasses.

    def options_of(self, given: Given, keywords: dict):
        """Options for an op's call with these non-default `keywords`."""
        return self.Options(**{**self._defaults, **keywords})

    def check(self, given: Given, options) -> None:
        """Raise for errors that show without memory: dtypes, devices, shapes. Non-optional arguments are known to be
        tensors; compare sizes through `ops.holds`."""
        raise NotImplementedError

    def check_options(self, options) -> None:
        """Raise for an option with a wrong type or value."""
        check_options(options)

    def check_memory(self, given: Given, options):
        """Raise for strides and addresses that no kernel takes. Returns the options with the device's defaults filled
        in."""
        return options

    def result(self, given: Given, options) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the single output."""
        raise NotImplementedError

    def lists_of(self, given: Given) -> dict[str, torch.Tensor]:
        """The 1-D tensors of `lists` that a call was given, by name."""
        lists = zip(self.lists, given[len(self._tensors) :], strict=False)
        return {name: x for name, x in lists if x is not None}

    def allocated(self, given: Given, options: tuple) -> Given:
        """`given` with outputs allocated; `options` as for `run`."""
        shape, dtype = self.result(given, self.Options(*options))
        out, place = tensors.new_empty(given[0], shape, tensors.dense_strides(shape), dtype), self._first_out
        return given[:place] + (out,) + given[place + 1 :]

    def fake(self, given: Given, options) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Fake outputs, from input layouts only."""
        shape, dtype = self.result(given, options)
        return given[0].new_empty(shape, dtype=dtype)

    def readable(self, given: Given) -> Given:
        """Inputs with copies where kernels cannot read them."""
        return given

    def needs_kernel(self, given: Given) -> bool:
        raise NotImplementedError

    def prepare(self, given: Given, options) -> launches.Prepared | None:
        """The launch for a checked call; None if other functions have already computed the result."""
        raise NotImplementedError

    def define(self, given: Given, options) -> None:
        """Write the result without a kernel."""
        raise NotImplementedError

    def differentiate(self, given: Given, options) -> torch.Tensor | None:
        """The result for a call that torch records; None to go on without a gradient."""
        self.check_arguments(given, options)

    # To be described by products, for `supports` and `precompile`, which have sizes alone.

    def kind_for(self, dtype: torch.dtype | str, usual: Kind | None) -> Kind | None:
        """The kind for operands of this dtype: the `usual` one if it is among the operation's."""
        raise NotImplementedError

    def results(self, kind: Kind) -> tuple[torch.dtype, ...]:
        """Dtypes that `out` may have."""
        raise NotImplementedError

    def without_memory(self, asked) -> tuple[Given, NamedTuple]:
        """Tensors on meta, and options, for a call with such `checks.Sizes`."""
        raise NotImplementedError

    def check_sizes(self, asked) -> None:
        """Raise what a call with such `checks.Sizes` would raise."""
        given, options = self.without_memory(asked)
        self.check(given, options)
        self.check_memory(given, options)

    # To be described for `explain`, beside `without_memory`; a product has `dense.Product.problem_for` instead.

    sizes = "m n k"
    """Sizes that `explain` takes, out of m, n, k, groups and heads."""

    unexplained = "one kernel for each dtype, bound by memory; `explain reduction` shows the walls of such kernels"
    """Why `explain` does not know an operation that is neither a product nor predicts its time."""

    def predict(self, given: Given, options, bytes_moved: int, hardware: Hardware) -> Prediction:
        """The time of a checked call on meta tensors, whose results are among them."""
        raise NotImplementedError

    def with_outs(self, given: Given, options) -> Given:
        """`given`, with fake outputs if it has none."""
        if given[self._first_out] is not None:
            return given
        made = self.fake(given, options)
        made = (made,) if self._has_one_out else made
        return (*given[: self._first_out], *made, *given[self._last_out + 1 :])

    # Derived from the description.

    def run(self, given: Given, options: tuple) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A call; `options` equal an `Options`."""
        if is_traced():
            return self.trace(given, options)
        asked = given
        try:
            if is_grad_enabled():
                if _AD._current_level >= 0:
                    self.refuse_tangents(given)
                for x in given:  # takes 0.8 us less than `any` with a generator
                    if x is not None and x.requires_grad:
                        self._refuse_levels()
                        result = self.differentiate(given, self.Options(*options))
                        if result is not None:
                            return result
                        break
            if given[self._first_out] is None or given[self._last_out] is None or self.scratch:
                given = self.allocated(given, options)
            if not _launcher.launch_known(self.launches, options, given):
                self._run_unknown(given, options)
        except launches.NotLoaded as error:
            raise error.of(self.called) from None
        except Exception:
            reason = error_of(self.checked, asked, self.Options(*options))
            if reason is None:
                raise
            raise reason from None
        return given[self._first_out] if self._has_one_out else given[self._written_to]

    def trace(self, given: Given, options: tuple) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not self._allocates:
            self._require_outs(given)
        if is_grad_enabled():
            self._refuse_transforms(given)
        named = self.Options(*options)
        ops.refuse_config(getattr(named, "config", None))
        lists = dict(zip(self.lists, given[len(self._tensors) :], strict=False))
        names = (name for name in (*self._own, *self._options) if name not in lists)
        inputs, outs = self._parts(given[: len(self._tensors)])
        return self(inputs, outs, {name: getattr(named, name) for name in names} | lists)

    def _refuse_transforms(self, given: Given) -> None:
        """Raise where an op would lose a gradient or a tangent, without a word."""
        if not is_dynamo_compiling():
            if _AD._current_level >= 0:
                self.refuse_tangents(given)
        elif passes_gradients(self.called) and _AD._current_level >= 0:
            # Dynamo then leaves the call to eager code, which knows whether a tensor has a tangent.
            raise RuntimeError(f"{self.called} is called within forward-mode AD, for which it has no derivative")

    def _refuse_levels(self) -> None:
        """Raise within a transform of torch.func, which takes no gradient of ours. In code that it has not compiled as
        a whole, torch.compile would do without one."""
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(f"{self.called} has no gradient within a transform of torch.func: call it outside")

    def check_arguments(self, given: Given, options) -> None:
        present = {}
        for place, (name, x) in enumerate(zip(self.names_in(options), given, strict=True)):
            if x is None and place in self._may_lack:
                continue
            if not isinstance(x, torch.Tensor):
                may_lack = place in self._may_lack and place not in self._outs
                raise tensors.no_tensor(name, x, self.sources.get(name, "pass a tensor on the GPU"), may_lack)
            present[name] = x
        tensors.require_plain(**present)
        self.refuse_gradients(given, options)
        self.check_options(options)

    def names_in(self, options) -> tuple[str, ...]:
        return self.names

    def refuse_gradients(self, given: Given, options) -> None:
        """Raise where torch would record a call that has no gradient to give back."""
        if not is_grad_enabled():
            return
        for name, x in zip(self.names, given, strict=True):
            if x is not None and x.requires_grad and name in self.gradient_of:
                self.refuse_gradient(name, given, options)

    def refuse_tangents(self, given: Given) -> None:
        """Raise where forward-mode AD would take a result for a constant."""
        for name, x in zip(self.names, given, strict=True):
            if isinstance(x, torch.Tensor) and tensors.is_plain(x) and forward_ad.unpack_dual(x).tangent is not None:
                raise RuntimeError(
                    f"{name} has a tangent of torch.autograd.forward_ad, and {self.called} has no derivative in that "
                    f"direction: call within torch.no_grad(), or pass forward_ad.unpack_dual({name}).primal"
                )

    def refuse_gradient(self, name: str, given: Given, options) -> None:
        raise gradient_error(name, f"{self.called} has none", self.to_train)

    def checked(self, given: Given, options):
        """Run all checks on a call, whose outputs may be None; returns the options with the device's defaults filled
        in."""
        self.check_arguments(given, options)
        self.check(given, options)
        self._require_disjoint(given, options)
        return self.check_memory(given, options)

    def _require_disjoint(self, given: Given, options) -> None:
        """Raise if an output shares memory with another tensor. A signature has no addresses, so on a GPU only the
        first call with a signature is checked; on a CPU, every call."""
        named = [*zip(self.names_in(options), given, strict=True)]
        for place in self._outs:
            name, out = named[place]
            for other, x in named[:place] + named[place + 1 :]:
                if out is not None and x is not None and tensors.share_memory(out, x):
                    raise ValueError(
                        f"{name} shares memory with {other}, which would be overwritten: pass another {name}"
                    )

    def _run_unknown(self, given: Given, options: tuple) -> None:
        """Slow path: no launch is cached for these options and this signature, or C cannot read the tensors."""
        named = self.Options(*options)
        self.check_arguments(given, named)
        given = self.readable(given)
        launches.enqueue(self.launches, options, given, partial(self._first, given, named))

    def _first(self, given: Given, options) -> launches.Prepared | None:
        """The launch for a new signature; None if the result is already computed."""
        checked = self.checked(given, options)
        if self.needs_kernel(given):
            return self.prepare(given, checked)
        # Inference mode allows writes to tensors that require a gradient; autocast knows no float64.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            self.define(given, options)
        return None

    def _require_outs(self, given: Given) -> None:
        for place in self._outs:
            if given[place] is None:
                name = self.names[place]
                raise tensors.no_tensor(name, None, self.sources.get(name, "pass a tensor"))

    def _call_of_op(self, inputs: tuple, outs: tuple, keywords: dict) -> tuple[Given, tuple]:
        """Raises within torch.func.jvp, which hides from an op which tensors have tangents."""
        if _AD._current_level >= 0 and _TRANSFORMS.JVP_NESTING and is_grad_enabled():
            raise RuntimeError(
                f"torch.ops.deep_tile.{self.name} is called within torch.func.jvp and has no derivative in that "
                "direction: call it outside, or within torch.no_grad()"
            )
        all_tensors = (*inputs, *outs)
        given = tuple([all_tensors[i] for i in self._order])
        if self.lists:
            given = (*given, *(keywords.get(name) for name in self.lists))
            keywords = {name: value for name, value in keywords.items() if name not in self.lists}
        return given + self._no_scratch, self.options_of(given, keywords)

    def _run_op(self, inputs: tuple, outs: tuple, keywords: dict):
        return self.run(*self._call_of_op(inputs, outs, keywords))

    def _check_op(self, inputs: tuple, outs: tuple, keywords: dict) -> None:
        given, options = self._call_of_op(inputs, outs, keywords)
        self.check_options(options)
        self.refuse_gradients(given, options)
        self.check(given, options)

    def _fake(self, inputs: tuple, keywords: dict):
        return self.fake(*self._call_of_op(inputs, (None,) * len(self._outs), keywords))


class Arg(NamedTuple):
    """A tensor argument of a `Described` operation.

    Attributes:
        shape: size names, as "t n"; equal names mean equal sizes.
        dtypes: allowed dtypes; an allocated output has the first.
        is_dense: the last dimension must have unit stride, and rows of an output must not overlap.
    """

    shape: str
    dtypes: tuple[torch.dtype, ...]
    is_dense: bool = False


class Described(Operation):
    """An operation whose checks, allocations and fakes follow from shapes and dtypes. Subclasses add `prepare` and
    `define`.

    Args:
        args: an `Arg` for each tensor, in their order.
        others: as for `Operation`.
    """

    def __init__(self, name: str, tensors: str, keywords: str, args: tuple[Arg, ...], **others) -> None:
        self.args = args
        super().__init__(name, tensors, keywords, **others)

    def check_arguments(self, given: Given, options) -> None:
        self._check_dtypes(given)
        super().check_arguments(given, options)

    def check(self, given: Given, options) -> None:
        self._check_dtypes(given)
        self._sizes(given)

    def check_memory(self, given: Given, options):
        for (place, name, arg), x in self._present(given):
            if not arg.is_dense:
                continue
            rows, columns = x.stride()[:-1], x.stride(-1)
            if x.shape[-1] > 1 and columns != 1:
                raise ValueError(
                    f"{name} must have a unit column stride; its strides are {x.stride()}. Pass {name}.contiguous()"
                )
            if place in self._outs and len(x) > 1 and rows and rows[-1] < x.shape[-1]:
                raise ValueError(f"rows of {name} overlap: its strides are {x.stride()}. Pass a dense {name}")
        return options

    def result(self, given: Given, options) -> tuple[tuple[int, ...], torch.dtype]:
        sizes, out = self._sizes(given), self.args[self._first_out]
        return tuple(sizes[size] for size in out.shape.split()), out.dtypes[0]

    def needs_kernel(self, given: Given) -> bool:
        """Tensors without memory are left to torch, since no kernel can be launched with them."""
        x = given[0]
        filled = all(tensor.numel() for _, tensor in self._present(given))
        return filled and self.is_on_gpu(x) and launches.is_hopper(x.get_device())

    def _present(self, given: Given) -> list[tuple[tuple[int, str, Arg], object]]:
        """Present tensors, each with its place, name and `Arg`."""
        described = zip(range(len(given)), self.names, self.args, strict=True)
        return [
            (about, x)
            for about, x in zip(described, given, strict=True)
            if x is not None or about[0] not in self._may_lack
        ]

    def _check_dtypes(self, given: Given) -> None:
        for (_, name, arg), x in self._present(given):
            if not isinstance(x, torch.Tensor) or x.dtype not in arg.dtypes:
                seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x)}"
                wanted = " or ".join(map(str, arg.dtypes))
                raise TypeError(f"{name} is {seen}; {self.called} takes a tensor of {wanted}. Convert it with .to()")

    def _sizes(self, given: Given) -> dict[str, int]:
        """Sizes by name. Raises ValueError if sizes or devices disagree."""
        sizes, said_by = {}, {}
        for (_, name, arg), x in self._present(given):
            wanted, first = arg.shape.split(), self.names[0]
            if x.dim() != len(wanted):
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; it must have {_COUNTS[len(wanted)]}, so .view() it as "
                    f"[{', '.join(wanted)}]"
                )
            if x.device != given[0].device:
                raise ValueError(
                    f"{name} is on {x.device} but {first} is on {given[0].device}; move it with .to({first}.device)"
                )
            for size, number in zip(wanted, x.shape, strict=True):
                if not ops.holds(sizes.setdefault(size, number) == number):
                    other = said_by[size]
                    raise ValueError(
                        f"{name} has shape {list(x.shape)} but {other} {list(given[self.names.index(other)].shape)}; "
                        f"it must be [{', '.join(wanted)}] = {[sizes.get(each, each) for each in wanted]}"
                    )
                said_by.setdefault(size, name)
        return sizes


_COUNTS = {1: "one dimension", 2: "two dimensions", 3: "three dimensions"}


def gradient_error(name: str, why: str, to_train: str = "") -> RuntimeError:
    """The error for a tensor whose gradient would be dropped."""
    instead = f". To train, {to_train}; otherwise" if to_train else ":"
    return RuntimeError(
        f"{name} requires a gradient, and {why}{instead} call within torch.no_grad(), or pass {name}.detach(), or "
        f"freeze it with {name}.requires_grad_(False)"
    )


def error_of(check: Callable, *arguments, **keywords) -> Exception | None:
    """The exception that `check` raises: why torch or the launcher failed on an argument."""
    try:
        check(*arguments, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None
