"""A cluster of thread blocks as a machine: sequential programs that meet at barriers and share memory.

A process is a warp, or a warpgroup whose warps act alike; its program is a list of the operations below, without
branches. Whatever is begun and not done at once (TMA, cp.async, st.async, a WGMMA, a load, a write that TMA is to see)
is a flight: it uses memory from where a process issues it to where it lands. One that then tells somebody lands as a
step of its own, at any time. One that does not lands with the step that waits for it: nobody sees it land, and to use
memory for as long as can be is the worst that it can do.

Shared memory is cut into cells, as finely as the programs' regions demand; a cell knows what it holds, how many flights
read it, and whether one writes it. `Machine` says which steps may be done, does them, and raises `Fault` where one is
wrong. Which orders are tried is the business of orders.py, what the programs are that of protocol.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from orders import Order

Name = tuple
"""A barrier's or a buffer's name: its block, what it is, and its number. Block -1 belongs to no block."""

DEADLOCK = "deadlock"
OVERWRITTEN = "overwritten before it was read"
UNWRITTEN = "read before it was written"
ARRIVALS = "more arrivals than a phase expects"
ALIASING = "phase aliasing"
BYTES = "byte count"
EXITED = "exit before others are done"
BEYOND = "beyond its buffer"
UNINITIALIZED = "barrier not initialized"
ENDLESS = "a role that never ends"
TILES = "elements not stored once"


class Fault(Exception):
    """A fault: one of the kinds above, where it is, and the steps that lead to it if they were recorded."""

    def __init__(self, kind: str, where: str):
        super().__init__(f"{kind}: {where}")
        self.kind = kind
        self.steps: list[str] = []


class Region(NamedTuple):
    """Rows of a buffer: what a write leaves there, or what a read must find."""

    buffer: Name
    begin: int
    end: int
    holds: tuple


class Init(NamedTuple):
    """mbarrier.init"""

    barrier: Name
    arrivals: int


class Arrive(NamedTuple):
    """mbarrier.arrive by so many threads, after mbarrier.expect_tx of so many bytes."""

    barrier: Name
    arrivals: int
    expected_bytes: int = 0


class Complete(NamedTuple):
    """complete_tx: so many bytes have landed. Of flights only."""

    barrier: Name
    landed_bytes: int


class Wait(NamedTuple):
    """mbarrier.try_wait.parity until it holds: the end of a phase, counted from 0; -1 has ended from the beginning."""

    barrier: Name
    phase: int


class Reach(NamedTuple):
    """bar.arrive by `threads` of the `total` that a phase of this named barrier takes."""

    barrier: Name
    threads: int
    total: int


class Sync(NamedTuple):
    """bar.sync: reach it, and wait for the others."""

    barrier: Name
    threads: int
    total: int


class Use(NamedTuple):
    """Ordinary reads and writes, done when the next operation begins."""

    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class Issue(NamedTuple):
    """A flight that reads and writes from here on. When the process's earlier flights of the group `after` have landed,
    it lands too, and then arrives or completes."""

    group: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    then: Complete | Arrive | None = None
    after: str | None = None


class Join(NamedTuple):
    """Wait until all but the last `pending` of the process's flights of a group have landed."""

    group: str
    pending: int = 0


Operation = Init | Arrive | Wait | Reach | Sync | Use | Issue | Join


class Process(NamedTuple):
    name: str
    block: int
    operations: list[Operation]


Cells = tuple[tuple[int, tuple], ...]
"""Cells, and what each must hold."""


class Flight(NamedTuple):
    """An Issue, linked. `after` has a bit for each flight that lands first, `blocks` are those whose memory it uses."""

    number: int
    issuer: int
    issue: Issue
    reads: Cells
    writes: Cells
    then: Complete | Arrive | None
    after: int
    blocks: frozenset[int]


class Meet(NamedTuple):
    """The linked arrival of a Reach or Sync. It must count in `phase`: who meets at a named barrier does so in each."""

    barrier: int
    arrivals: int
    phase: int


class Landed(NamedTuple):
    """A Join, linked: a bit for each flight."""

    flights: int


class State:
    """The state of all processes, flights, barriers and cells.

    Attributes:
        positions: of each process, in its program.
        running: processes of each block that have something left to do.
        under_way: a bit for each flight that has not landed.
        limits, phases, arrived, missing: of each barrier: arrivals that a phase takes (0 before it is initialized), the
            present phase, its arrivals so far, and the bytes that it expects less those that have landed.
        holds, users: of each cell: what it holds, and how many flights read it, or -1: one writes it.
    """

    __slots__ = ("positions", "running", "under_way", "limits", "phases", "arrived", "missing", "holds", "users")

    def copy(self) -> "State":
        twin = object.__new__(State)
        twin.under_way = self.under_way
        twin.positions, twin.running = self.positions.copy(), self.running.copy()
        twin.limits, twin.phases = self.limits.copy(), self.phases.copy()
        twin.arrived, twin.missing = self.arrived.copy(), self.missing.copy()
        twin.holds, twin.users = self.holds.copy(), self.users.copy()
        return twin

    def key(self) -> int:
        """The key that tells states apart: the steps done, and their effects."""
        barriers = (*self.phases, *self.arrived, *self.missing)
        return hash((tuple(self.positions), self.under_way, barriers, tuple(self.holds)))


class Machine:
    """Processes, and buffers of so many rows, ready to run. Raises Fault where a region reaches beyond its buffer."""

    def __init__(self, processes: list[Process], buffers: dict[Name, int]):
        self.processes = processes
        self.blocks = 1 + max(process.block for process in processes)
        self.flights: list[Flight] = []
        self._barriers: dict[Name, int] = {}
        self._totals: dict[int, int] = {}  # threads of the named ones
        self._cells = _cells(processes, buffers)
        self.programs = [self._link(number, process) for number, process in enumerate(processes)]
        self.barrier_names = list(self._barriers)
        self._touching = [_bits(a.number for a in self.flights if block in a.blocks) for block in range(self.blocks)]
        self._telling = _bits(flight.number for flight in self.flights if flight.then)
        self._reading_turns = self._turns()

    def start(self) -> State:
        state, barriers = State(), len(self.barrier_names)
        cells = sum(len(cells) for cells in self._cells.values())
        state.positions, state.under_way = [0] * len(self.processes), 0
        state.running = [0] * self.blocks
        for process in self.processes:
            state.running[process.block] += bool(process.operations)
        state.limits = [self._totals.get(number, 0) for number in range(barriers)]
        state.phases, state.arrived, state.missing = ([0] * barriers for _ in range(3))
        state.holds, state.users = [None] * cells, [0] * cells
        return state

    # Linking: names become numbers.

    def _barrier(self, name: Name) -> int:
        return self._barriers.setdefault(name, len(self._barriers))

    def _link(self, number: int, process: Process) -> list:
        linked = []
        phases: dict[Name, int] = {}  # of the named barriers that it reaches
        groups: dict[str, list[int]] = {}  # flights that it has issued and not yet joined
        for operation in process.operations:
            match operation:
                case Reach(name, threads, total) | Sync(name, threads, total):
                    barrier, phase = self._barrier(name), phases.get(name, 0)
                    assert self._totals.setdefault(barrier, total) == total, name
                    linked.append(Meet(barrier, threads, phase))
                    if isinstance(operation, Sync):
                        linked.append(Wait(barrier, phase))
                    phases[name] = phase + 1
                case Issue():
                    linked.append(self._link_issue(number, operation, groups))
                case Join(group, pending):
                    issued = groups.get(group, [])
                    joined = issued[: len(issued) - pending]
                    groups[group] = issued[len(joined) :]
                    linked.append(Landed(_bits(joined)))
                case Use(reads, writes):
                    linked.append(Use(self._link_regions(reads), self._link_regions(writes)))
                case _:
                    linked.append(operation._replace(barrier=self._barrier(operation.barrier)))
        return linked

    def _link_issue(self, process: int, issue: Issue, groups: dict[str, list[int]]) -> Flight:
        number, earlier = len(self.flights), groups.setdefault(issue.group, [])
        after = _bits(groups.get(issue.after, ()))
        if issue.after == issue.group:
            earlier.clear()  # it lands after them: whoever comes after it comes after them
        earlier.append(number)
        then = issue.then and issue.then._replace(barrier=self._barrier(issue.then.barrier))
        names = [region.buffer for region in (*issue.reads, *issue.writes)]
        names += [issue.then.barrier] if issue.then else []
        blocks = frozenset(block for block, *_ in names)
        regions = self._link_regions(issue.reads), self._link_regions(issue.writes)
        flight = Flight(number, process, issue, *regions, then, after, blocks)
        self.flights.append(flight)
        return flight

    def _link_regions(self, regions: Iterable[Region]) -> Cells:
        return tuple(
            (cell, region.holds)
            for region in regions
            for row, cell in self._cells[region.buffer].items()
            if region.begin <= row < region.end
        )

    def _turns(self) -> dict[tuple[int, tuple], tuple[int, int]]:
        """When each cell must be read: what grows along its readers' programs, which read by turns."""
        turns: dict[tuple[int, tuple], tuple[int, int]] = {}
        for number, program in enumerate(self.programs):
            found = (read for operation in program for read in getattr(operation, "reads", ()))
            contents = Counter()  # that the program has read from each cell
            for cell, holds in dict.fromkeys(found):
                turns.setdefault((cell, holds), (contents[cell], number))
                contents[cell] += 1
        return turns

    # Steps: whether a process's next operation may be done, and doing it.

    def ready(self, state: State, process: int) -> bool:
        """Raises Fault if the process waits in a phase that a parity takes for another."""
        program, position = self.programs[process], state.positions[process]
        if position == len(program):
            return False
        operation = program[position]
        return type(operation) is not Wait or self._has_ended(state, process, operation)

    def _has_ended(self, state: State, process: int, wait: Wait) -> bool:
        phase = state.phases[wait.barrier]
        if state.limits[wait.barrier] == 0:
            raise Fault(UNINITIALIZED, f"{self.actor_name(process)} waits for {self.barrier_name(wait.barrier)}")
        if phase not in (wait.phase, wait.phase + 1):
            name = self.barrier_name(wait.barrier)
            where = f"{self.actor_name(process)} awaits the end of phase {wait.phase} of {name}, which is in {phase}"
            raise Fault(ALIASING, where)
        return phase > wait.phase

    def step(self, state: State, process: int, order: "Order | None" = None) -> None:
        """The next operation of a process that is ready. Raises Fault."""
        operation = self.programs[process][state.positions[process]]
        kind = type(operation)
        if kind is Arrive or kind is Meet:
            self._arrive(state, process, operation, order)
        elif kind is Flight:
            self._issue(state, operation, order)
        elif kind is Use:
            self._use(state, process, operation.reads, operation.writes, order)
        elif kind is Landed:
            self._land_all(state, operation.flights, order)
        elif kind is Init:
            state.limits[operation.barrier] = operation.arrivals
        if order and kind in (Wait, Landed, Use, Init):
            order.done(process, operation)
        state.positions[process] += 1
        if state.positions[process] == len(self.programs[process]):
            self._exit(state, self.processes[process].block)

    def _exit(self, state: State, block: int) -> None:
        """Exit a process. A block's memory is gone with its last process."""
        state.running[block] -= 1
        left = state.under_way & self._touching[block]
        if state.running[block] == 0 and left:
            flight = self.flights[left.bit_length() - 1]
            raise Fault(EXITED, f"block {block} is done, and {self.actor_name(self.actor_of(flight))} uses its memory")

    def _use(self, state: State, actor: int, reads: Cells, writes: Cells, order: "Order | None") -> None:
        for cell, holds in reads:
            if state.users[cell] < 0 or state.holds[cell] != holds:
                present = self._reading_turns.get((cell, state.holds[cell]), (-1, 0))
                kind = OVERWRITTEN if present > self._reading_turns[cell, holds] else UNWRITTEN
                raise Fault(kind, f"{self.actor_name(actor)} reads {holds} from {self.cell_name(cell)}")
        for cell, holds in writes:
            if state.users[cell] != 0:
                raise Fault(OVERWRITTEN, f"{self.actor_name(actor)} writes {holds} to {self.cell_name(cell)}")
            state.holds[cell] = holds
        if order:
            order.uses(actor, reads, writes)

    def _issue(self, state: State, flight: Flight, order: "Order | None") -> None:
        if order:
            order.issued(flight)
        self._use(state, self.actor_of(flight), flight.reads, flight.writes, order)
        for cell, _ in flight.reads:
            state.users[cell] += 1
        for cell, _ in flight.writes:
            state.users[cell] = -1
        state.under_way |= 1 << flight.number

    def _arrive(self, state: State, actor: int, arrive: Arrive | Meet | Complete, order: "Order | None") -> None:
        barrier = arrive.barrier
        block = self.barrier_names[barrier][0]
        if block >= 0 and state.running[block] == 0:
            raise Fault(EXITED, f"{self._arrival(actor, barrier)}, which is done")
        if state.limits[barrier] == 0:
            raise Fault(UNINITIALIZED, self._arrival(actor, barrier))
        kind, phase = type(arrive), state.phases[barrier]
        if kind is Meet and arrive.phase != phase:
            raise Fault(ARRIVALS, f"{self._arrival(actor, barrier)} in phase {phase}, not {arrive.phase}")
        if kind is Complete:
            state.missing[barrier] -= arrive.landed_bytes
        else:
            state.arrived[barrier] += arrive.arrivals
        if kind is Arrive:
            state.missing[barrier] += arrive.expected_bytes
        if order:
            order.arrived(actor, barrier, BYTES if kind is Complete else ARRIVALS)
        self._end_phase(state, actor, barrier, order)

    def _end_phase(self, state: State, actor: int, barrier: int, order: "Order | None") -> None:
        """If all have arrived and all bytes have landed."""
        arrived, limit, missing = state.arrived[barrier], state.limits[barrier], state.missing[barrier]
        if arrived > limit:
            raise Fault(ARRIVALS, f"{self._arrival(actor, barrier)}, which makes {arrived} of {limit}")
        if arrived == limit and missing < 0:
            raise Fault(BYTES, f"{self._arrival(actor, barrier)}, which makes {-missing} more than expected")
        if arrived == limit and missing == 0:
            state.arrived[barrier] = 0
            state.phases[barrier] += 1
            if order:
                order.ended(actor, barrier)

    def actor_of(self, flight: Flight) -> int:
        """Flights are counted on from the processes."""
        return len(self.processes) + flight.number

    def flights_of(self, bits: int) -> Iterator[Flight]:
        """The flights of a bit set."""
        while bits:
            yield self.flights[(bits & -bits).bit_length() - 1]
            bits &= bits - 1

    def landing(self, state: State) -> Iterator[Flight]:
        """Flights that may land as a step of their own: those that then tell somebody."""
        return self.flights_of(state.under_way & self._telling)

    def land(self, state: State, flight: Flight, order: "Order | None" = None) -> None:
        """Raises Fault."""
        self._land_all(state, flight.after, order)
        for cell, _ in flight.reads:
            state.users[cell] -= 1
        for cell, _ in flight.writes:
            state.users[cell] = 0
        state.under_way &= ~(1 << flight.number)
        if order:
            order.landed(flight)
        if flight.then:
            self._arrive(state, self.actor_of(flight), flight.then, order)

    def _land_all(self, state: State, flights: int, order: "Order | None") -> None:
        for flight in self.flights_of(flights & state.under_way):
            self.land(state, flight, order)

    def check_end(self, state: State) -> None:
        """Check a state without further steps. Raises Fault if work is left."""
        stuck = [i for i, program in enumerate(self.programs) if state.positions[i] < len(program)]
        if not stuck:
            return
        waits = [self.programs[i][state.positions[i]] for i in stuck]
        short_of_bytes = any(state.arrived[wait.barrier] == state.limits[wait.barrier] for wait in waits)
        lines = [f"  {self.actor_name(i)} awaits {self._lack(state, w)}" for i, w in zip(stuck, waits, strict=True)]
        raise Fault(BYTES if short_of_bytes else DEADLOCK, "\n".join(["nobody can go on", *lines]))

    # Words for messages.

    def _arrival(self, actor: int, barrier: int) -> str:
        return f"{self.actor_name(actor)} arrives on {self.barrier_name(barrier)}"

    def step_name(self, actor: int, position: int = 0) -> str:
        """The name of a process's step there, or of a flight's landing."""
        name = self.actor_name(actor)
        if actor >= len(self.processes):
            return f"{name} lands"
        operation = self.programs[actor][position]
        if isinstance(operation, Arrive | Meet):
            return self._arrival(actor, operation.barrier)
        if isinstance(operation, Wait):
            return f"{name} has awaited phase {operation.phase} of {self.barrier_name(operation.barrier)}"
        if isinstance(operation, Flight):
            return f"{self.actor_name(self.actor_of(operation))} begins"
        if isinstance(operation, Landed):
            groups = dict.fromkeys(flight.issue.group for flight in self.flights_of(operation.flights))
            return f"{name} has awaited its {' and '.join(groups) or 'flights, of which there are none'}"
        return f"{name}: {type(operation).__name__}"

    def _lack(self, state: State, wait: Wait) -> str:
        barrier = wait.barrier
        arrivals = f"{state.arrived[barrier]} of {state.limits[barrier]} arrivals"
        return f"{self.barrier_name(barrier)}, phase {wait.phase}: {arrivals}, {state.missing[barrier]} bytes missing"

    def barrier_name(self, barrier: int) -> str:
        return _text(self.barrier_names[barrier])

    def cell_name(self, cell: int) -> str:
        return _text(next(name for name, cells in self._cells.items() if cell in cells.values()))

    def actor_name(self, actor: int) -> str:
        """The name of a process or a flight."""
        if actor < len(self.processes):
            return self.processes[actor].name
        flight = self.flights[actor - len(self.processes)]
        buffers = dict.fromkeys(_text(region.buffer) for region in (*flight.issue.reads, *flight.issue.writes))
        of = f" of {' and '.join(buffers)}" if buffers else ""
        return f"{self.processes[flight.issuer].name}'s {flight.issue.group}{of}"


def _text(name: Name) -> str:
    block, what, *indices = name
    text = what + "".join(f"[{index}]" for index in indices)
    return text if block < 0 else f"{text} in block {block}"


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _cells(processes: list[Process], buffers: dict[Name, int]) -> dict[Name, dict[int, int]]:
    """For each buffer, the rows at which cells begin, and the cells' numbers. Raises Fault."""
    starts: dict[Name, set[int]] = {name: {0} for name in buffers}
    for process in processes:
        for operation in process.operations:
            for buffer, begin, end, _ in (*getattr(operation, "reads", ()), *getattr(operation, "writes", ())):
                if not 0 <= begin <= end <= buffers[buffer]:
                    rows = f"rows {begin} to {end} of the {buffers[buffer]} of {_text(buffer)}"
                    raise Fault(BEYOND, f"{process.name} uses {rows}")
                starts[buffer] |= {begin, end} - {buffers[buffer]}
    numbers = count()
    return {buffer: {row: next(numbers) for row in sorted(rows)} for buffer, rows in starts.items()}
