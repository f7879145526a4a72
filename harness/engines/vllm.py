"""The policy on one or many vLLM replicas, as one `InferenceEngine`.

Flows in: requests, published weights. Flows out: exact generations, whichever replicas made them. Who may go where is
`routing.py`'s business, what of a broken stream may be kept `stream.py`'s, one server's routes `vllm_replica.py`'s.

A replica is open (takes requests), held (an update has it paused) or out. Only an update holds one: an open one, or where none
is open one that nobody brings back; only that update opens it again or takes it out. Every other failure takes out open ones
only; `_revive`, which restarts a replica and loads the current policy, brings it back. So traffic meets no weights but the
current policy's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_exponential

from harness.engines.probe import compare
from harness.engines.routing import Lane, Place, Router, session_of
from harness.engines.stream import Lost, Mislabelled, Progress, Stream
from harness.engines.vllm_replica import Deadlines, KvMode, Policy, ReplicaHandle, VllmReplica, Weights
from harness.engines.vllm_transfer import WeightFile
from harness.errors import EngineError, SaoError
from harness.protocols import GenerateRequest, Generation

log = logging.getLogger(__name__)

ATTEMPTS = 10
"""So often one generation is begun or gone on with."""
RESTARTS = 3
WINDOW = 32
"""Requests in flight per replica, to begin with."""
POLL_S = 1.0


class VllmEngine:
    """An `InferenceEngine` over replicas that serve `version` now, given as URLs or as handles that can be restarted.

    `kv`: whether running requests keep their old keys and values across an update, or compute them again. `dtype`: in which the
    replicas compute, that is how far their scores of one text may differ (`probe.LIMITS`).
    """

    def __init__(
        self,
        replicas: Sequence[str | ReplicaHandle],
        version: int = 0,
        *,
        kv: KvMode = "keep",
        window: int = WINDOW,
        dtype: str = "float32",
        deadlines: Deadlines | None = None,
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self.replicas = [VllmReplica(replica, version, kv, self.deadlines) for replica in replicas]
        self.router = Router([Lane(window) for _ in replicas])
        self.lost = 0
        """Attempts that a replica did not finish, so far."""
        self._dtype = dtype
        self._policy: Policy | None = None
        self._proof: tuple[Policy | None, list[int], list[float]] | None = None
        """The last probe, its policy, and the scores that a replica which comes back must repeat."""
        self._updating = False
        self._asleep: list[int] = []
        self._settled = asyncio.Event()
        self._settled.set()
        self._admissions: dict[Place, asyncio.Future[Stream]] = {}
        self._revivals: dict[int, asyncio.Task[None]] = {}
        self._monitor: asyncio.Task[None] | None = None

    # --- generations ---

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a continuation, on as many replicas one after the other as it takes. Raises `EngineError`."""
        self._watch()
        progress = Progress(request)
        number: int | None = None
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Lost),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self.deadlines.total_s):
                async for attempt in retrying:
                    with attempt:
                        if (whole := progress.complete()) is not None:
                            return whole
                        rest = progress.rest()
                        place = self.router.ask(session_of(request.request_id), len(rest.token_ids), number)
                        number = place.number
                        return progress.then(await self._attempt(rest, place, progress))
        except TimeoutError as error:
            limit = self.deadlines.total_s
            raise EngineError(
                f"no answer after {limit:.0f} s ({len(progress.ids)} tokens)", hint="see the engines' logs"
            ) from error
        except Lost as error:
            raise EngineError(f"given up after {ATTEMPTS} attempts: {error}", hint="see the engines' logs") from error
        raise AssertionError("unreachable")

    async def _attempt(self, rest: GenerateRequest, place: Place, progress: Progress) -> Generation:
        """Wait for a place and use it. Raises `Lost` with what could be kept added to `progress`."""
        stream: Stream | None = None
        completed = False
        try:
            stream = await self._admission(place)
            assert place.replica is not None
            index = place.replica
            try:
                await self.replicas[index].stream(rest, stream)
                generation = stream.generation(rest)
            except Lost as error:
                self.lost += 1
                progress.keep(stream)
                self.router.forget(place.session)
                log.warning("a generation was lost, %d tokens of it are kept: %s", len(progress.ids), error)
                await self._suspect(index, error.hung)
                raise
            except Mislabelled as error:
                self._lose(index, str(error), trusted=False)
                raise
            completed = True
            return generation
        finally:
            if place.replica is not None and stream is not None:
                self.replicas[place.replica].shut(stream)
            self.router.leave(place, completed)
            self._pump()

    async def _admission(self, place: Place) -> Stream:
        future: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._admissions[place] = future
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and place.replica is not None:
                self.replicas[place.replica].shut(future.result())
            raise
        finally:
            self._admissions.pop(place, None)

    def _pump(self) -> None:
        """Let go who can; whoever could only wait in vain fails."""
        for place in self.router.admit():
            assert place.replica is not None
            future = self._admissions.pop(place, None)
            if future is not None and not future.done():
                future.set_result(self.replicas[place.replica].open())
        if (
            not self._updating
            and not self._asleep
            and not self._revivals
            and all(lane.state == "out" for lane in self.router.lanes)
        ):
            for future in self._admissions.values():
                if not future.done():
                    future.set_exception(EngineError("no replica is left", hint="see the engines' logs"))

    # --- replicas that fail and come back ---

    async def _suspect(self, index: int, hung: bool) -> None:
        """A stream broke: is it the replica?"""
        open_now = self.router.lanes[index].state == "open"
        if open_now and (hung or not await self.replicas[index].healthy()):
            self._lose(index, "it is silent" if hung else "it is not healthy")

    def _lose(self, index: int, reason: str, trusted: bool = True) -> None:
        """Take an open replica out and bring it back. One that an update holds is the update's to judge."""
        if self.router.lanes[index].state == "open":
            self._take_out(index, reason, trusted)
            self._revive(index)

    def _take_out(self, index: int, reason: str, trusted: bool = True) -> None:
        log.error("replica %s is taken out: %s", self.replicas[index].url, reason)
        self.router.lanes[index].state = "out"
        self.replicas[index].cut(trusted)

    def _revive_all(self) -> None:
        for index, lane in enumerate(self.router.lanes):
            if lane.state == "out":
                self._revive(index)

    def _revive(self, index: int) -> None:
        if index not in self._revivals:
            self._revivals[index] = asyncio.create_task(self._bring_back(index))

    async def _bring_back(self, index: int) -> None:
        replica = self.replicas[index]
        stop = stop_after_delay(self.deadlines.restart_s) if replica.handle is None else stop_after_attempt(RESTARTS)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((SaoError, OSError)),
            stop=stop,
            wait=wait_exponential(multiplier=0.1, max=30.0),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await replica.restart()
                    await self._replay(replica)
                    self.router.lanes[index].state = "open"
            log.warning("replica %s is back with version %d", replica.url, replica.version)
        except (SaoError, OSError) as error:
            log.error("replica %s stays out: %s", replica.url, error)
        finally:
            del self._revivals[index]
            self._pump()

    async def _replay(self, replica: VllmReplica) -> None:
        """The current policy, also if it changes meanwhile: on return no update runs that this replica would miss."""
        while True:
            policy = self._policy
            if policy is not None:
                await replica.load(policy)
            await replica.resume()
            await replica.check_label()
            if self._proof is not None and self._proof[0] is policy:
                _, probe, scores = self._proof
                self._compare(replica.url, await replica.score(probe), scores)
            while not self._settled.is_set():
                await self._settled.wait()
            if policy is self._policy:
                return

    def _watch(self) -> None:
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._poll_for_ever())

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.gather(*map(self._poll, self._open()))
            await asyncio.sleep(POLL_S)

    async def _poll(self, index: int) -> None:
        try:
            self.router.report(index, await self.replicas[index].load_figures())
        except EngineError as error:
            log.warning("replica %s gives no figures: %s", self.replicas[index].url, error)
            await self._suspect(index, hung=False)
        self._pump()

    def _open(self) -> list[int]:
        return [index for index, lane in enumerate(self.router.lanes) if lane.state == "open"]

    # --- weights ---

    async def update_weights(self, path: Path, version: int, sha256: str | None = None) -> None:
        """Publish a safetensors file that every replica can read; see `publish`."""
        await self.publish(WeightFile(path, sha256), version)

    async def publish(self, weights: Weights, version: int) -> None:
        """Pause all, load all, and only then resume those that have loaded; the others are restarted and follow.

        Raises `EngineError` if none has, and none that has died can be restarted and loaded: then everything stays paused until
        a further update succeeds, and requests in flight fail.
        """
        if self._updating:
            raise EngineError("an update is under way already", hint="publish one version after the other")
        if self._asleep:
            raise EngineError("the engine is asleep", hint="wake it first")
        self._watch()
        policy = Policy(weights, version)
        self._updating = True
        try:
            held = [index for index, lane in enumerate(self.router.lanes) if lane.state != "out"]
            if not held:  # the last update failed: who is out and not on the way back is perhaps only paused
                held = [index for index in range(len(self.replicas)) if index not in self._revivals]
            errors = await self._publish(policy, held)
            if len(errors) < len(held):
                self._revive_all()
                return
            for index in held:  # the weights may be to blame, but not where the server has died
                if self.replicas[index].handle is not None and not await self.replicas[index].healthy():
                    self._revive(index)
            self._policy = policy
            while self._revivals and not self._open():
                await asyncio.wait(self._revivals.values(), return_when=asyncio.FIRST_COMPLETED)
            if not self._open():
                reasons = "; ".join(map(str, errors.values())) or "none came back"
                raise EngineError(f"no replica has taken version {version}: {reasons}", hint="see the engines' logs")
        finally:
            self._updating = False
            self._pump()

    async def _publish(self, policy: Policy, held: list[int]) -> dict[int, EngineError]:
        """Update these replicas and resume them together; those that failed are out, with their errors."""
        self._settled.clear()
        for index in held:
            self.router.lanes[index].state = "held"
        errors: dict[int, EngineError] = {}

        async def twice(index: int, step: Callable[[], Awaitable[None]]) -> None:
            for _ in range(2):
                try:
                    await step()
                    errors.pop(index, None)
                    return
                except EngineError as error:
                    log.warning("replica %s, update to %d: %s", self.replicas[index].url, policy.version, error)
                    errors[index] = error

        async def resume(index: int) -> None:
            await twice(index, self.replicas[index].resume)
            if index not in errors:
                self.router.lanes[index].state = "open"
                self._pump()

        try:
            await asyncio.gather(*(twice(index, partial(self.replicas[index].load, policy)) for index in held))
            loaded = [index for index in held if index not in errors]
            if loaded:
                self._policy = policy
            await asyncio.gather(*map(resume, loaded))
        finally:
            for index in held:
                if self.router.lanes[index].state == "held":
                    self._take_out(index, str(errors.get(index, "the update was given up")))
            self._settled.set()
        return errors

    # --- sleep ---

    async def sleep(self) -> None:
        """Give the devices' memory back until `wake`: weights go to the hosts, keys and values are dropped; requests wait.

        For servers that share their devices with a trainer (`VllmServer.sleep_mode`; on CPUs vLLM only pauses, CUDA was not run
        here). Raises `EngineError` while requests or updates are in flight; who cannot sleep is taken out.
        """
        if self._updating or self._asleep or self._revivals or any(lane.in_flight for lane in self.router.lanes):
            raise EngineError("the engine cannot sleep: it is busy, or asleep", hint="let requests and updates end first")
        self._asleep = self._open()
        for index in self._asleep:
            self.router.lanes[index].state = "held"
        await self._all_asleep(VllmReplica.sleep)
        if not self._asleep:
            self._revive_all()
            raise EngineError("no replica could sleep", hint="see the engines' logs")

    async def wake(self) -> None:
        """Go on with the weights of before. Who does not wake is restarted."""
        await self._all_asleep(VllmReplica.wake)
        for index in self._asleep:
            self.router.lanes[index].state = "open"
        self._asleep = []
        self._revive_all()
        self._pump()

    async def _all_asleep(self, step: Callable[[VllmReplica], Awaitable[None]]) -> None:
        async def each(index: int) -> None:
            try:
                await step(self.replicas[index])
            except EngineError as error:
                self._asleep.remove(index)
                self._take_out(index, str(error))

        await asyncio.gather(*map(each, list(self._asleep)))

    # --- scores and figures ---

    async def canary(self, probe: list[int]) -> list[tuple[str, list[float]]]:
        """(url, log p of tokens 1..) of every replica that serves now."""
        self._watch()

        async def each(index: int) -> list[float] | None:
            try:
                return await self.replicas[index].score(probe)
            except EngineError:
                await self._suspect(index, hung=False)
                if self.router.lanes[index].state == "open":
                    raise
                return None

        serving = self._open()
        scored = await asyncio.gather(*map(each, serving))
        found = zip(serving, scored, strict=True)
        return [(self.replicas[index].url, scores) for index, scores in found if scores is not None]

    async def score(self, token_ids: list[int]) -> list[float]:
        """The first replica's scores, once every replica has been asked: whoever compares them with the trainer's judges all.

        Raises `EngineError` if two replicas differ by more than rounding.
        """
        answers = await self.canary(token_ids)
        if not answers:
            raise EngineError("no replica serves now", hint="see the engines' logs")
        (_, scores), *others = answers
        for url, other in others:
            self._compare(url, other, scores)
        self._proof = self._policy, token_ids, scores
        return scores

    def _compare(self, url: str, scores: list[float], others: list[float]) -> None:
        apart = compare(scores, others, (self._dtype, self._dtype))
        if not apart.within:
            raise EngineError(f"{url} and another replica disagree on one probe: {apart}", hint="one of them has wrong weights")

    async def metrics(self) -> dict[str, float]:
        """Sums over the open replicas as of now (`kv_usage`, `prefix_hit_rate`: means), and the router's own figures."""
        await asyncio.gather(*map(self._poll, self._open()))
        lanes = [self.router.lanes[index] for index in self._open()]
        loads = [lane.load for lane in lanes if lane.load is not None]
        queries = sum(load.prefix_queries for load in loads)
        return {
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
            "generated_tokens": sum(load.generated_tokens for load in loads),
            "preemptions": sum(load.preemptions for load in loads),
            "kv_usage": sum(load.kv_usage for load in loads) / max(1, len(loads)),
            "prefix_hit_rate": sum(load.prefix_hits for load in loads) / queries if queries else 0.0,
            "replicas": float(len(lanes)),
            "window": float(sum(lane.window for lane in lanes)),
            "queued": float(len(self.router.queue)),
            "lost_attempts": float(self.lost),
        }

    async def close(self) -> None:
        """Let go of every connection, which ends what runs. The servers belong to whoever started them."""
        tasks = [*self._revivals.values(), *([self._monitor] if self._monitor else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._monitor = None
        for lane, replica in zip(self.router.lanes, self.replicas, strict=True):
            lane.state = "out"
            replica.cut(trusted=False)
        self._pump()
        for replica in self.replicas:
            await replica.close()
