"""Programs of a GPU as threads: groups of warps that take turns at random, barriers, and what is on its way."""

import random
import threading


class Wrong(Exception):
    """What would be a race, a hang, or a place outside of its memory."""


class Stopped(BaseException):
    """Ends the other groups of warps where one has failed."""


class Group:
    """Warps that run the same code at the same time: one thread, and what they have asked for."""

    def __init__(self, number, run=None):
        self.number, self.thread, self.turn = number, threading.Thread(target=run, daemon=True), threading.Semaphore(0)
        self.ready = lambda: True
        self.products, self.stores = [], []  # that read shared memory
        self.loads, self.committed = [], []  # of a place for each entry


class Program:
    """The program that is running: its groups of warps, its barriers, and copies that have not come in yet."""

    now = None

    def __init__(self, number, count, warps, seed):
        self.number, self.count, self.warps = number, count, warps
        self.chance = random.Random(1000 * seed + number)
        self.memories, self.barriers = [], {}
        self.copies, self.late = [], []  # the latter come in only when nothing else can go on
        self.first, self.groups, self.error = Group(0), [], None

    @property
    def group(self):
        here = threading.current_thread()
        return next((group for group in self.groups if group.thread is here), self.first)

    def run(self, kernel, arguments):
        Program.now = self
        try:
            kernel(**arguments)
            if self.copies or self.late:
                raise Wrong("a copy is still on its way at the end")
        finally:
            Program.now = None

    def specialize(self, parts, warps, registers):
        """Run these in a group of warps each."""
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        self.groups = [Group(1 + i, lambda part=part: self._run_part(*part)) for i, part in enumerate(parts)]
        for group in self.groups:
            group.thread.start()
        self._pass_on()
        for group in self.groups:
            group.thread.join()
        if self.error is not None:
            raise self.error
        if any(product.tiles for group in self.groups for product in group.products):
            raise Wrong("a product is still on its way at the end")
        self.groups = []

    def _run_part(self, kernel, arguments):
        mine = self.group
        mine.turn.acquire()
        try:
            if self.error is None:
                kernel(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        mine.ready = None
        self._pass_on()

    def wait(self, ready=lambda: True):
        """Let others go on, and copies come in, at least until that is so."""
        if not self.groups:
            while not ready():
                self._let_one_in()
            return
        mine = self.group
        mine.ready = ready
        self._pass_on()
        mine.turn.acquire()
        if self.error is not None:
            raise Stopped

    def copy(self, come):
        (self.late if self.chance.random() < 0.3 else self.copies).append(come)
        self.wait()

    def _let_one_in(self):
        if not self.copies and not self.late:
            raise Wrong("all wait for what never comes")
        # the last of those that are late, so that the first ones are as late as can be
        (self.copies.pop(self.chance.randrange(len(self.copies))) if self.copies else self.late.pop())()

    def _pass_on(self):
        """To a group that can go on, if any is left; all are let go where one has failed."""
        while self.error is None:
            waiting = [group for group in self.groups if group.ready is not None]
            ready = [group for group in waiting if group.ready()]
            if not waiting:
                return
            try:
                if not ready or (self.copies and self.chance.random() < 0.5):
                    self._let_one_in()
                else:
                    self.chance.choice(ready).turn.release()
                    return
            except Wrong as error:
                self.error = error
        for group in self.groups:
            group.turn.release()


class Barrier:
    """What mbarriers count: who has arrived, and bytes that have not."""

    def __init__(self, count):
        self.count = self.missing = count
        self.bytes, self.phase = 0, 0

    def change(self, arrived, size):
        self.missing -= arrived
        self.bytes += size
        if self.missing < 0 or self.bytes < 0:
            raise Wrong("more came to a barrier than it waits for")
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


def start_barrier(tile, count):
    Program.now.barriers[tile.address()] = Barrier(count)


def barrier_at(tile):
    if tile.address() not in Program.now.barriers:
        raise Wrong("a barrier that was not set up")
    return Program.now.barriers[tile.address()]


def expect(tile, size, pred=True):
    if pred:
        barrier_at(tile).change(1, size)


def arrive(tile, count=1, pred=True):
    if pred:
        barrier_at(tile).change(count, 0)


def wait_for(tile, phase):
    barrier, phase = barrier_at(tile), int(phase)
    Program.now.wait(lambda: barrier.phase != phase)


class OnItsWay:
    """A product or a copy that reads shared memory until it is done."""

    def __init__(self, tiles, pending):
        self.tiles, self.done = tiles, False
        for tile in tiles:
            tile.memory.readers[tile.words] += 1
        pending.append(self)

    def finish(self):
        for tile in self.tiles:
            tile.memory.readers[tile.words] -= 1
        self.tiles, self.done = [], True


def wait_until(pending, count):
    """At most so many are left."""
    while len(pending) > count:
        pending.pop(0).finish()
