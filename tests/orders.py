"""The orders in which a machine's steps may be done: one that stands for all, every one, or one drawn at random.

`prove` runs one order, and follows which steps come before which in all of them. That is enough, because nothing here
chooses: programs have no branches, arrivals add up in any order, and a wait that may pass may pass for good. Orders can
differ in three ways only, and `prove` refuses each:

1. an arrival, or bytes that land, may count in the phase before its own;
2. a wait may come when its barrier is in neither of the two phases that a parity tells apart;
3. two uses of a cell, one of them a write, of which neither comes before the other.

To see that these are all, take another order, and of its steps the first that does not follow all that it follows here.
It is a wait, for everything else needs nothing but its own process's step before it. All arrivals before it count in
the same phases as here: each comes after the end of the phase before its own, and its own cannot end without it. So the
barrier is in the phase in which these steps leave it here, which by 2 is the awaited one or the next; the wait passes
in the next only, and so it does follow all that it follows here. Hence all orders are made of the same steps. One that
stops early has left some undone, and all that the first of them needs is done, so it has not stopped. One order that
ends thus proves that all end, and by 3 cells hold in all of them what they hold in it.

`explore` takes none of this on trust: it visits every state that some order reaches, and joins steps only where no
order that parts them can tell. A process runs from a wait through the uses of memory behind it and the arrivals behind
these. An order that parts them does no more than one with the wait later: a wait changes nothing for others; what
others do to the same memory in between they may do before the wait as well; and arrivals only let others go on.

Where `prove` and `explore` differ, it is in faults that nothing comes of, such as an arrival too many in the last phase
of a barrier: `prove` refuses them, and tests/test_protocol.py looks that it is never the other way round.
"""

import random
from collections.abc import Callable, Iterator

from machine import (
    ALIASING,
    EXITED,
    OVERWRITTEN,
    UNINITIALIZED,
    UNWRITTEN,
    Arrive,
    Cells,
    Fault,
    Flight,
    Init,
    Landed,
    Machine,
    Meet,
    State,
    Use,
    Wait,
)


def prove(machine: Machine) -> int:
    """How many steps every order has. Raises Fault if there is one in which something goes wrong."""
    state, order = machine.start(), Order(machine)
    steps = 0
    while True:
        before = steps
        for process in range(len(machine.processes)):
            while machine.ready(state, process):
                machine.step(state, process, order)
                steps += 1
        for flight in list(machine.landing(state)):
            machine.land(state, flight, order)
            steps += 1
        if steps == before:
            machine.check_end(state)
            order.check_exits()
            return steps


class Order:
    """A partial order: which steps come before which in every run. A set of steps is an integer with a bit for each."""

    def __init__(self, machine: Machine):
        barriers = len(machine.barrier_names)
        self._machine = machine
        self._actors: list[int] = []  # of each step: a process, or a flight, which are counted on
        self._past = [0] * (len(machine.processes) + len(machine.flights))  # all before an actor's next step
        self._initialized = [0] * barriers
        self._present = [0] * barriers  # all before the end of a barrier's present phase, as far as it has got
        self._ended = [(0, 0)] * barriers  # all before the ends of the two phases before that
        self._waits = [0] * barriers  # for the end of the last one
        self._written: dict[int, int] = {}  # the step by which a cell holds what it holds
        self._read: dict[int, int] = {}  # those by which that has been read
        self._touched = [0] * machine.blocks  # those that use a block's memory

    def _step(self, actor: int) -> int:
        step = 1 << len(self._actors)
        self._actors.append(actor)
        self._past[actor] |= step
        return step

    def _demand(self, kind: str, actor: int, steps: int, what: Callable[[], str], past: int | None = None) -> None:
        """Require that an actor's past, or the given one, contains these steps. Raises Fault."""
        missing = steps & ~(self._past[actor] if past is None else past)
        if missing:
            other = self._machine.actor_name(self._actors[missing.bit_length() - 1])
            raise Fault(kind, f"{self._machine.actor_name(actor)} {what()}, and need not wait for {other}")

    def done(self, process: int, operation: Wait | Landed | Use | Init) -> None:
        """Raises Fault."""
        if isinstance(operation, Wait):
            self._waited(process, operation.barrier)
        elif isinstance(operation, Init):
            self._initialized[operation.barrier] = self._step(process)
        elif isinstance(operation, Landed):
            for flight in self._machine.flights_of(operation.flights):
                self._past[process] |= self._past[self._machine.actor_of(flight)]
        else:
            self._used(self._step(process), operation.reads, operation.writes)

    def _waited(self, process: int, barrier: int) -> None:
        def what() -> str:
            return f"may await {self._machine.barrier_name(barrier)} a phase early"

        before, awaited = self._ended[barrier]
        self._demand(UNINITIALIZED, process, self._initialized[barrier], what)
        self._demand(ALIASING, process, before, what)
        self._past[process] |= awaited
        self._waits[barrier] |= self._step(process)

    def arrived(self, actor: int, barrier: int, kind: str) -> None:
        """Raises Fault, of this kind if the arrival may count a phase early."""

        def what() -> str:
            return f"may arrive on {self._machine.barrier_name(barrier)} a phase early"

        self._demand(UNINITIALIZED, actor, self._initialized[barrier], what)
        self._demand(kind, actor, self._ended[barrier][1], what)
        step = self._step(actor)
        self._present[barrier] |= self._past[actor]
        block = self._machine.barrier_names[barrier][0]
        if block >= 0:
            self._touched[block] |= step

    def ended(self, actor: int, barrier: int) -> None:
        """A phase, by an actor's arrival. Raises Fault."""

        def what() -> str:
            return f"may end a phase of {self._machine.barrier_name(barrier)} after the awaited one"

        self._demand(ALIASING, actor, self._waits[barrier], what, past=self._present[barrier])
        self._ended[barrier] = self._ended[barrier][1], self._present[barrier]
        self._present[barrier] = self._waits[barrier] = 0

    def issued(self, flight: Flight) -> None:
        self._past[self._machine.actor_of(flight)] = self._past[flight.issuer]

    def landed(self, flight: Flight) -> None:
        actor = self._machine.actor_of(flight)
        for earlier in self._machine.flights_of(flight.after):
            self._past[actor] |= self._past[self._machine.actor_of(earlier)]
        step = self._step(actor)
        self._used(step, flight.reads, flight.writes)
        for block in flight.blocks:
            self._touched[block] |= step

    def uses(self, actor: int, reads: Cells, writes: Cells) -> None:
        """Check uses that begin here. Raises Fault."""
        for cell, holds in reads:
            self._demand(UNWRITTEN, actor, self._written.get(cell, 0), self._use_name("reads", cell, holds))
        for cell, holds in writes:
            used = self._written.get(cell, 0) | self._read.get(cell, 0)
            self._demand(OVERWRITTEN, actor, used, self._use_name("writes", cell, holds))

    def _use_name(self, verb: str, cell: int, holds: tuple) -> Callable[[], str]:
        return lambda: f"{verb} {holds} in {self._machine.cell_name(cell)}"

    def _used(self, step: int, reads: Cells, writes: Cells) -> None:
        for cell, _ in reads:
            self._read[cell] = self._read.get(cell, 0) | step
        for cell, _ in writes:
            self._written[cell], self._read[cell] = step, 0

    def check_exits(self) -> None:
        """After the last step: raises Fault if a block may be done before all that use its memory."""
        for block, touched in enumerate(self._touched):
            warps = [actor for actor, process in enumerate(self._machine.processes) if process.block == block]
            past = 0
            for actor in warps:
                past |= self._past[actor]
            self._demand(EXITED, warps[0], touched, lambda: "and all others of its block may be done", past)


class TooManyStates(Exception):
    """More than `explore` may visit."""


def explore(machine: Machine, limit: int) -> int:
    """How many states there are in all orders. Raises Fault, with the steps that lead to it, or TooManyStates."""
    first = machine.start()
    seen, path, steps = {first.key()}, [_successors(machine, first)], [(0, 0)]
    while path:
        try:
            step, state = next(path[-1], (None, None))
        except Fault as fault:
            fault.steps = [machine.step_name(*step) for step in steps[1:]]
            raise
        if state is None:
            path.pop()
            steps.pop()
        elif (key := state.key()) not in seen:
            if len(seen) == limit:
                raise TooManyStates(f"more than {limit} states")
            seen.add(key)
            path.append(_successors(machine, state))
            steps.append(step)
    return len(seen)


def _successors(machine: Machine, state: State) -> Iterator[tuple[tuple[int, int], State]]:
    """The possible steps of a state (actor and position) with the states after them. Raises Fault."""
    ended = True
    for process in range(len(machine.processes)):
        if machine.ready(state, process):
            ended = False
            after = state.copy()
            _run_on(machine, after, process)
            yield (process, state.positions[process]), after
    for flight in machine.landing(state):
        ended = False
        after = state.copy()
        machine.land(after, flight)
        yield (machine.actor_of(flight), 0), after
    if ended:
        machine.check_end(state)


def _run_on(machine: Machine, state: State, process: int) -> None:
    """A step, the uses of memory behind it, and the arrivals behind these."""
    program = machine.programs[process]
    arrivals, uses = (Arrive, Meet), (Use, Flight, Landed, Init)
    has_arrived = False
    while True:
        has_arrived |= isinstance(program[state.positions[process]], arrivals)
        machine.step(state, process)
        if state.positions[process] == len(program):
            return
        following = program[state.positions[process]]
        if not isinstance(following, arrivals) and (has_arrived or not isinstance(following, uses)):
            return


def walk(machine: Machine, seed: int) -> int:
    """How many steps there are in an order drawn at random, in which some actors are much slower than others.

    Raises Fault, with the steps that lead to it.
    """
    source = random.Random(seed)
    paces = [10 ** source.uniform(-4, 4) for _ in machine.processes]
    groups = sorted({(flight.issuer, flight.issue.group) for flight in machine.flights})
    landing_paces = {group: 10 ** source.uniform(-4, 4) for group in groups}
    state, steps = machine.start(), []
    try:
        while True:
            ready = [process for process in range(len(machine.processes)) if machine.ready(state, process)]
            flights = list(machine.landing(state))
            if not ready and not flights:
                machine.check_end(state)
                return len(steps)
            weights = [paces[process] for process in ready]
            weights += [landing_paces[flight.issuer, flight.issue.group] for flight in flights]
            (chosen,) = source.choices([*ready, *flights], weights)
            if isinstance(chosen, Flight):
                steps.append((machine.actor_of(chosen), 0))
                machine.land(state, chosen)
            else:
                steps.append((chosen, state.positions[chosen]))
                machine.step(state, chosen)
    except Fault as fault:
        fault.steps = [machine.step_name(*step) for step in steps]
        raise
