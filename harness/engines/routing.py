"""Which replica a request goes to, and when: no sockets, no clock. Read by `vllm.py`.

Flows in: requests that ask, requests that end, replicas that come and go, their `Load`. Flows out: who may go where now.

A session stays with its replica (its prefix is cached there) as long as that lives; a new one goes to the replica with the
fewest tokens in flight. Each replica has a window of requests in flight: one more for every request that completes with the
window full and the replica at ease, half of what is in flight when it keeps a queue or runs out of memory. Who does not fit
waits; of those that want the same replica the first comes first.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from harness.engines.load import Load

AT_EASE = 0.9
"""Below this share of its key-value memory a replica may take more."""
FULL = 0.95
SESSIONS = 100_000
"""So many sessions are remembered; forgetting one costs it its cached prefix, no more."""


@dataclass(slots=True, eq=False)
class Place:
    """A request: in the queue as long as `replica` is None, then on that replica."""

    number: int
    session: str
    tokens: int
    replica: int | None = None


@dataclass(slots=True)
class Lane:
    """One replica. `held`: takes nothing for now, its sessions wait. `out`: gone, its sessions move."""

    window: int
    state: Literal["open", "held", "out"] = "open"
    in_flight: int = 0
    tokens: int = 0
    chosen: int = 0
    """Number of the last new session that it got."""
    load: Load | None = None

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request now."""
        return self.state == "open" and self.in_flight < self.window


@dataclass(slots=True)
class Router:
    """The queue and the replicas, by index."""

    lanes: list[Lane]
    queue: list[Place] = field(default_factory=list)
    _homes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _asked: int = 0

    def ask(self, session: str, tokens: int, number: int | None = None) -> Place:
        """Queue up; `number`: that of an earlier place whose work goes on, which keeps its turn. Session "" is nobody's."""
        if number is None:
            self._asked += 1
            number = self._asked
        place = Place(number, session, tokens)
        bisect.insort(self.queue, place, key=lambda p: p.number)
        return place

    def admit(self) -> list[Place]:
        """Take everybody out of the queue who may go now, and count them in."""
        gone = []
        for place in self.queue:
            index = self._destination(place)
            if index is None:
                continue
            lane = self.lanes[index]
            lane.in_flight += 1
            lane.tokens += place.tokens
            place.replica = index
            gone.append(place)
        self.queue = [place for place in self.queue if place.replica is None]
        return gone

    def leave(self, place: Place, completed: bool = False) -> None:
        """The request has ended, or has given up waiting. Safe to call twice."""
        if place.replica is None:
            self.queue = [other for other in self.queue if other is not place]
            return
        lane = self.lanes[place.replica]
        at_ease = lane.load is not None and lane.load.waiting == 0 and lane.load.kv_usage < AT_EASE
        if completed and at_ease and lane.in_flight == lane.window:
            lane.window += 1
        lane.in_flight -= 1
        lane.tokens -= place.tokens
        place.replica = None

    def forget(self, session: str) -> None:
        """Its replica has failed it: the next request goes to any."""
        self._homes.pop(session, None)

    def report(self, index: int, load: Load) -> None:
        """What the replica says. Its window is cut once, then not again until what is in flight fits into it.

        Requests that wait once may be a burst whose prompts are being read; two reports in a row are a queue.
        """
        lane = self.lanes[index]
        queues = load.waiting > 0 and lane.load is not None and lane.load.waiting > 0
        lane.load = load
        crowded = queues or load.kv_usage > FULL
        if lane.state == "open" and crowded and lane.in_flight <= lane.window:
            lane.window = max(1, lane.in_flight // 2)

    def _destination(self, place: Place) -> int | None:
        home = self._homes.get(place.session)
        if home is not None and self.lanes[home].state != "out":
            self._homes.move_to_end(place.session)
            return home if self.lanes[home].has_room else None
        free = [index for index, lane in enumerate(self.lanes) if lane.has_room]
        if not free:
            return None
        best = min(free, key=lambda index: (self.lanes[index].tokens, self.lanes[index].in_flight, self.lanes[index].chosen))
        self.lanes[best].chosen = max(lane.chosen for lane in self.lanes) + 1
        if place.session:
            self._homes[place.session] = best
            self._homes.move_to_end(place.session)
            if len(self._homes) > SESSIONS:
                self._homes.popitem(last=False)
        return best


def session_of(request_id: str) -> str:
    """EPISODE of "EPISODE/TURN"."""
    return request_id.rpartition("/")[0]
