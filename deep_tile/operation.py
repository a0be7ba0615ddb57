"""The life of a call, once for all operations.

A subclass of `Operation` describes some: their tensors and options, what can be wrong about them, the launch that a new
signature needs, and the result where no kernel runs. What each call does with its description is here: the warm call,
one call into C; the first call of a signature; the error of a wrong one; the refusal of gradients; and the op, its fake
and its overload.
Invariant: a call whose options and signature are known has passed all checks, since the signature holds every property
of the tensors that a check reads.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import is_grad_enabled

from deep_tile import _launcher, launches, ops, tensors
from deep_tile.options import check as check_options

OPERATIONS: "dict[str, Operation]" = {}
"""Those whose modules are imported, by name."""

Given = tuple[torch.Tensor | None, ...]
"""A call's tensors in the order of the overload `out`: None is what is not given, or not allocated yet."""


class Operation(ops.Op):
    """A function of the package and its op.

    Args:
        name, tensors, keywords: as for `ops.Op`. `tensors` are those of a launch, too, in this order; what is written
            to lies side by side.
        sources: where the right tensor of a name comes from, for an error.
        to_train: what to do where a gradient is wanted, as a sentence; it has none itself.
        gradient_of: names of the tensors whose gradient is refused; those of others are dropped. None: all.
        lists: names of further tensors, of one dimension, which may be None; keywords of the op.
        scratch: names of tensors behind these that `allocated` makes for kernels alone; a call has None there.
        called: what the function is called, where the op has another name.
        how: as for `ops.Op`.

    Attributes:
        Options: the NamedTuple of a call's keywords. A call hands them on as a plain tuple, which is made faster.
        launches: those of this operation, by options and signature.
        names: of the tensors.
    """

    Options: type
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
        self._may_lack = {i for i, tensor in enumerate(self._tensors) if tensor.endswith("?")}
        self._may_lack |= {*self._outs} if self._allocates else set()
        self._may_lack |= {*range(len(self._tensors), len(self.names))}

    # What a description says.

    def options_of(self, given: Given, keywords: dict):
        """Those of an op's call, whose `keywords` are not as by default."""
        return self.Options(**{**self._defaults, **keywords})

    def check(self, given: Given, options) -> None:
        """Raise for what is wrong, as far as that can be told without memory: dtypes, devices, shapes. All tensors but
        those that may be None are tensors; compared sizes go through `ops.holds`."""
        raise NotImplementedError

    def check_options(self, options) -> None:
        """Raise for an option of a wrong type or value."""
        check_options(options)

    def check_memory(self, given: Given, options):
        """Raise for strides and addresses that no kernel takes. Returns the options, defaults of the device filled
        in."""
        return options

    def result(self, given: Given, options) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the one tensor that is written to."""
        raise NotImplementedError

    def lists_of(self, given: Given) -> dict[str, torch.Tensor]:
        """Those that a call was given, by name."""
        lists = zip(self.lists, given[len(self._tensors) :], strict=False)
        return {name: x for name, x in lists if x is not None}

    def allocated(self, given: Given, options: tuple) -> Given:
        """`given` with what is written to; `options` are as `run` has them."""
        shape, dtype = self.result(given, self.Options(*options))
        out, place = tensors.new_empty(given[0], shape, tensors.dense_strides(shape), dtype), self._first_out
        return given[:place] + (out,) + given[place + 1 :]

    def fake(self, given: Given, options) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What is written to, of tensors of which only the layout is known."""
        shape, dtype = self.result(given, options)
        return given[0].new_empty(shape, dtype=dtype)

    def readable(self, given: Given) -> Given:
        """What kernels read instead of tensors that they cannot read."""
        return given

    def needs_kernel(self, given: Given) -> bool:
        raise NotImplementedError

    def prepare(self, given: Given, options) -> launches.Prepared | None:
        """The launch of a call that has been checked. None where the call has been made by other functions."""
        raise NotImplementedError

    def define(self, given: Given, options) -> None:
        """Write the result of a call that needs no kernel."""
        raise NotImplementedError

    def differentiate(self, given: Given, options) -> torch.Tensor | None:
        """The result of a call that torch records; None to go on without a gradient."""
        self.check_arguments(given, options)

    # What follows from it.

    def run(self, given: Given, options: tuple) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A call outside of tracing.

        Args:
            options: equal to an instance of `Options`.
        """
        try:
            if is_grad_enabled():
                for x in given:  # takes 0.8 us less than `any` of a generator
                    if x is not None and x.requires_grad:
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
            reason = error_of(self.checked, given, self.Options(*options))
            if reason is None:
                raise
            raise reason from None
        return given[self._first_out] if self._has_one_out else given[self._written_to]

    def trace(self, given: Given, options: tuple) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A call that becomes one of the op."""
        if not self._allocates:
            self._require_outs(given)
        named = self.Options(*options)
        ops.refuse_config(getattr(named, "config", None))
        lists = dict(zip(self.lists, given[len(self._tensors) :], strict=False))
        names = (name for name in (*self._own, *self._options) if name not in lists)
        inputs, outs = self._parts(given[: len(self._tensors)])
        return self(inputs, outs, {name: getattr(named, name) for name in names} | lists)

    def check_arguments(self, given: Given, options) -> None:
        """Raise for what no signature tells: of each argument by itself what it is."""
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
        """What the caller knows the tensors as."""
        return self.names

    def refuse_gradients(self, given: Given, options) -> None:
        """Raise where torch would record a call that has no gradient to give back."""
        if not is_grad_enabled():
            return
        for name, x in zip(self.names, given, strict=True):
            if x is not None and x.requires_grad and name in self.gradient_of:
                self.refuse_gradient(name, given, options)

    def refuse_gradient(self, name: str, given: Given, options) -> None:
        raise gradient_error(name, f"{self.called} has none", self.to_train)

    def checked(self, given: Given, options):
        """The options, with defaults of the device filled in. Raises for everything that can be wrong about a call,
        whose outputs may be None."""
        self.check_arguments(given, options)
        self.check(given, options)
        return self.check_memory(given, options)

    def _run_unknown(self, given: Given, options: tuple) -> None:
        """A call of options and a signature that C has not met, or of tensors that it cannot read."""
        named = self.Options(*options)
        self.check_arguments(given, named)
        given = self.readable(given)
        launches.enqueue(self.launches, options, given, partial(self._first, given, named))

    def _first(self, given: Given, options) -> launches.Prepared | None:
        """The launch of a signature not met before; None when the result is there."""
        checked = self.checked(given, options)
        if self.needs_kernel(given):
            return self.prepare(given, checked)
        with torch.inference_mode():  # in which any tensor may be written to, whether it requires a gradient or not
            self.define(given, options)
        return None

    def _require_outs(self, given: Given) -> None:
        for place in self._outs:
            if given[place] is None:
                name = self.names[place]
                raise tensors.no_tensor(name, None, self.sources.get(name, "pass a tensor"))

    def _call_of_op(self, inputs: tuple, outs: tuple, keywords: dict) -> tuple[Given, tuple]:
        """The tensors and the options of an op's call."""
        by_place = dict(zip((*self._inputs, *self._outs), (*inputs, *outs), strict=True))
        lists = (keywords.get(name) for name in self.lists)
        given = (*(by_place[place] for place in range(len(by_place))), *lists, *(None,) * len(self.scratch))
        keywords = {name: value for name, value in keywords.items() if name not in self.lists}
        return given, self.options_of(given, keywords)

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
    """A tensor of a `Described` operation.

    Attributes:
        shape: names of its sizes, as "t n", each of which is the same wherever it is named.
        dtypes: that it may have; of what is allocated the first.
        is_dense: its last dimension must have a unit stride, and what is written to no rows that overlap.
    """

    shape: str
    dtypes: tuple[torch.dtype, ...]
    is_dense: bool = False


class Described(Operation):
    """An operation whose tensors' shapes and dtypes say all that checks, allocations and fakes need. What is left to
    say are `prepare` and `define`.

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
        """Tensors without memory, which no kernel is launched with, are left to torch."""
        x = given[0]
        filled = all(tensor.numel() for _, tensor in self._present(given))
        return filled and self.is_on_gpu(x) and launches.is_hopper(x.get_device())

    def _present(self, given: Given) -> list[tuple[tuple[int, str, Arg], object]]:
        """Tensors but those that are None and may be, each with its place, name and `Arg`."""
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
        """By name. Raises ValueError where tensors do not agree, or lie on several devices."""
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
    """Of a tensor of this name, whose gradient would be dropped."""
    instead = f". To train, {to_train}; otherwise" if to_train else ":"
    return RuntimeError(
        f"{name} requires a gradient, and {why}{instead} call within torch.no_grad(), or pass {name}.detach(), or "
        f"freeze it with {name}.requires_grad_(False)"
    )


def error_of(check: Callable, *arguments, **keywords) -> Exception | None:
    """What `check` raises: it says why torch or the launcher stumbled over an argument."""
    try:
        check(*arguments, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None
