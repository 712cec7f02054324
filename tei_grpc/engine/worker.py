"""The in-process device: one thread that owns the model, takes batches from the queue and delivers their outputs."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.device import Deliver
from tei_grpc.engine.flight import Flight
from tei_grpc.engine.queue import Admission, Queue
from tei_grpc.engine.watchdog import TICK_SECONDS, Watchdog, stacks
from tei_grpc.errors import DeadlineError, InferenceError, StartupError, TeiError, UnavailableError, reason_of
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.metrics import Metrics
from tei_grpc.types import Entry, Failure, ModelFacts, Output

if TYPE_CHECKING:
    from tei_grpc.engine.runner import Runner

logger = logging.getLogger(__name__)

NS_PER_S = 1_000_000_000
GONE = "The model runner is gone"
HUNG = "The model runner does not answer"
RETRY_SECONDS = 1.0  # between two tries of a device that does not answer
ROOM_SECONDS = 1.0  # that no batch is started, for lack of room, before the watchdog gets to see the one that runs
POLL_SECONDS = 0.0002  # between two looks at a batch that runs, while there is room to start another


class Worker:
    """A Device in this process. Queue and permits live here, on the device's side of the seam."""

    def __init__(self, model: ModelConfig, config: EngineConfig, metrics: Metrics) -> None:
        self._model = model
        self._config = config
        self._metrics = metrics
        self._admission = Admission(config.max_concurrent_requests)
        self._queue = Queue(config.max_batch_tokens, config.max_batch_requests)
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._flights: tuple[Flight, ...] = ()
        self._landed_ns = 0
        self._given_up: set[int] = set()  # entries that have failed while their batch still runs
        self._healthy = True
        self._seconds_per_token = 0.0
        self._watchdog = Watchdog(config.runner_timeout, self._follow_watchdog)
        metrics.watch_queue(lambda: len(self._queue))
        metrics.watch_permits(lambda: self._admission.in_use, permits=config.max_concurrent_requests)

    async def start(self, deliver: Deliver, on_state: Callable[[bool], None]) -> ModelFacts:
        """See Device."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._on_state = on_state
        self._ready: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._thread.start()
        facts = await self._ready
        self._watching = self._loop.create_task(self._watchdog.watch())
        return facts

    def admit(self, *, waits: bool) -> Awaitable[None] | None:
        """See Device."""
        return self._admission.admit(waits=waits)

    def release(self) -> None:
        """See Device."""
        self._admission.release()

    def submit(self, entry: Entry) -> None:
        """See Device."""
        if self._watchdog.is_hung:
            raise UnavailableError(HUNG)
        if not self._queue.put(entry):
            raise UnavailableError(GONE)

    def cancel(self, entry_id: int) -> None:
        """See Device."""
        self._queue.cancel(entry_id)

    async def stop(self) -> bool:
        """See Device."""
        self._fail(self._queue.close(), lambda: UnavailableError("The server is shutting down"))
        while self._thread.is_alive() and not self._watchdog.is_hung:
            await asyncio.to_thread(self._thread.join, TICK_SECONDS)
        if self._watching is not None:
            self._watching.cancel()
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            runner = self._load()
            if runner is not None:
                self._serve(runner)
        except BaseException:  # nobody above a thread could do more with it
            logger.exception("the device thread ended")
        finally:
            if not self._queue.closed:
                self._set_healthy(False)
            self._call(self._settle, StartupError("The model could not be loaded: its thread ended"))
            self._fail_all(GONE, self._queue.close())

    def _load(self) -> "Runner | None":
        try:
            runner = self._load_runner()
            runner.warm_up()
            self._is_told = runner.tell(self._queue.wake)
            self._queue.max_tokens = runner.choose_budget(self._config.max_batch_tokens)
            self._seconds_per_token = runner.seconds_per_token
            logger.info("batches have up to %d tokens", self._queue.max_tokens)
        except Exception as error:
            self._call(self._settle, _startup_error(error))
            self._queue.close()
            return None
        self._call(self._settle, runner.facts)
        return runner

    def _load_runner(self) -> "Runner":
        cpus.tune_process()
        from tei_grpc.engine.runner import Runner  # torch takes seconds to import: here, not on the event loop

        return Runner(self._model, self._config)

    def _settle(self, result: ModelFacts | StartupError) -> None:
        if self._ready.done():
            return
        if isinstance(result, StartupError):
            self._ready.set_exception(result)
        else:
            self._ready.set_result(result)

    def _serve(self, runner: "Runner") -> None:
        """Form batches as the device can take them: where it works by itself, one more than it runs."""
        while not self._queue.closed:
            has_room = runner.wait_for_room(ROOM_SECONDS)
            size = runner.size(self._queue.demand)
            taken = self._queue.take(self._patience(), size) if has_room else None
            if taken is None:
                self._idle(runner)
                continue
            self._fail(taken.expired, DeadlineError)
            if taken.batch:
                self._start(runner, taken.batch, size.most)
            self._land_all(runner, but=runner.ahead)
        self._land_all(runner, but=0)

    def _start(self, runner: "Runner", entries: Sequence[Entry], most: int) -> None:
        ahead = self._flights
        self._flights = (*ahead, Flight(entries, time.monotonic_ns(), most))  # being started
        self._flights = (*ahead, self._launch(runner, entries, most))
        self._land_due(runner, ahead)

    def _patience(self) -> float | None:
        """Seconds to wait for entries; while batches run, there is room for another one."""
        if self._flights:
            return ROOM_SECONDS if self._is_told else POLL_SECONDS
        return None if self._healthy else RETRY_SECONDS

    def _idle(self, runner: "Runner") -> None:
        if self._flights:
            self._land_due(runner, self._flights)
        elif not self._queue.closed and not self._healthy:  # nothing has come since the device failed
            self._check(runner)

    def _land_due(self, runner: "Runner", flights: Sequence[Flight]) -> None:
        for flight in flights:
            if flight.is_due:
                self._land_one(runner, flight)

    def _land_all(self, runner: "Runner", *, but: int) -> None:
        while len(self._flights) > but:
            self._land_one(runner, self._flights[0])

    def _land_one(self, runner: "Runner", flight: Flight) -> None:
        self._land(runner, flight)
        self._flights = tuple(other for other in self._flights if other is not flight)

    def _launch(self, runner: "Runner", entries: Sequence[Entry], most: int) -> Flight:
        entries = sorted(entries, key=len)  # texts of equal length run together
        started, run = time.monotonic_ns(), None
        try:
            with self._watchdog.running(0):
                run = runner.launch(pack(entries), self._queue.demand)
        except Exception:
            logger.exception("a batch of %d could not be started", len(entries))
        return Flight(entries, started, most, run)

    def _land(self, runner: "Runner", flight: Flight) -> None:
        """Wait for a batch and deliver it; one that failed is split in halves, so that only the entries at fault fail.

        When the model runs nothing at all any more, all of them fail at once. By then the error is forgotten: it would
        keep what the batch has left in the device's memory, of which there may be too little.
        """
        outputs, entries = self._collect(runner, flight), flight.entries
        if outputs is not None:
            self._metrics.batch_formed(len(entries), sum(map(len, entries)), budget=flight.most)
            self._call(self._hand_out, outputs)
            self._set_healthy(True)
        elif not self._check(runner) or len(entries) == 1:
            self._fail(entries, lambda: InferenceError("Inference failed"))
        else:
            middle = len(entries) // 2
            self._land(runner, self._launch(runner, entries[:middle], flight.most))
            self._land(runner, self._launch(runner, entries[middle:], flight.most))

    def _collect(self, runner: "Runner", flight: Flight) -> list[Output | Failure] | None:
        """None when the batch failed."""
        if flight.run is None:
            return None
        entries, recoveries = flight.entries, runner.recoveries
        started = max(flight.started_ns, 0 if self._is_told else self._landed_ns)  # the one before it may be in its way
        try:
            with self._watchdog.running(self._seconds_per_token * sum(map(len, entries))):
                results = flight.run.collect()
            inference_ns, size = time.monotonic_ns() - started, len(entries)
            return [
                Failure(entry.id, result)
                if isinstance(result, TeiError)
                else Output(entry.id, result, started - entry.queued_ns, inference_ns, size)
                for entry, result in zip(entries, results, strict=True)
            ]
        except Exception:
            logger.exception("a batch of %d failed", len(entries))
            return None
        finally:
            now, first = time.monotonic_ns(), min(each.started_ns for each in (flight, *self._flights))
            busy = (now - max(first, self._landed_ns)) / NS_PER_S  # whichever batches ran
            self._landed_ns = now
            self._metrics.batch_ended(busy, recoveries=runner.recoveries - recoveries)

    def _running(self) -> list[Entry]:
        return [entry for flight in self._flights for entry in flight.entries]

    def _check(self, runner: "Runner") -> bool:
        """After a failure: does the model still run at all? Health follows the answer."""
        try:
            with self._watchdog.running(0):
                runner.check()
        except Exception:
            logger.exception("the model does not run")
            self._set_healthy(False)
            return False
        self._set_healthy(True)
        return True

    def _set_healthy(self, healthy: bool) -> None:
        if healthy != self._healthy:
            self._healthy = healthy
            self._call(self._tell_state)

    def _tell_state(self) -> None:
        self._on_state(self._healthy and not self._watchdog.is_hung)

    def _follow_watchdog(self, is_hung: bool) -> None:
        """Answer all once the batch hangs; when it ends after all, everything goes on."""
        if is_hung:
            running = self._running()
            logger.error("a batch of %d hangs, at\n%s", len(running), stacks(self._thread))
            self._fail_all(HUNG, self._queue.clear())
            self._call(self._given_up.update, [entry.id for entry in running])
        else:
            logger.warning("the batch that hung has ended")
        self._tell_state()

    def _hand_out(self, results: Sequence[Output | Failure]) -> None:
        """Deliver, but nothing twice."""
        self._deliver([result for result in results if result.id not in self._given_up])
        self._given_up.difference_update(result.id for result in results)

    def _fail_all(self, text: str, waiting: Sequence[Entry]) -> None:
        """Fail what is on the device and what waits for it.

        Callers try UNAVAILABLE again elsewhere, which is for those that waited alone: one of the others may be what the
        device does not bear.
        """
        self._fail(self._running(), lambda: InferenceError(text))
        self._fail(waiting, lambda: UnavailableError(text))

    def _fail(self, entries: Sequence[Entry], error: Callable[[], TeiError]) -> None:
        if entries:
            self._call(self._hand_out, [Failure(entry.id, error()) for entry in entries])

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("event loop closed")


def _startup_error(error: Exception) -> StartupError:
    if isinstance(error, StartupError):
        return error
    logger.error("loading failed", exc_info=error)
    return StartupError(f"The model could not be loaded: {type(error).__name__}: {reason_of(error)}")
