"""The server whose calls are accepted by front-ends: this process has the ports, the model, and the last word."""

import asyncio
from contextlib import ExitStack
from typing import Any

from tei_grpc.config import Settings
from tei_grpc.engine.device import Device
from tei_grpc.engine.info import describe
from tei_grpc.engine.tokenizer import count_workers
from tei_grpc.engine.worker import Worker
from tei_grpc.errors import StartupError
from tei_grpc.frontends.exchange import Exchange
from tei_grpc.frontends.files import SharedFiles
from tei_grpc.frontends.frontend import Frontend
from tei_grpc.frontends.messages import Drain, Reload
from tei_grpc.frontends.process import Job
from tei_grpc.loading import hub
from tei_grpc.loading.failures import loading_errors
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.runtime import notices
from tei_grpc.runtime.listeners import Addresses, addresses_of, reserve
from tei_grpc.runtime.tls import read_certificates
from tei_grpc.types import Info

LATE_SECONDS = 10.0  # that front-ends may take longer to end than options say


class FrontendsServer:
    """See runtime.life.Server. One server to callers and operators, however many front-ends it has."""

    def __init__(self, settings: Settings, files: SharedFiles, metrics: Metrics, device: Device | None = None) -> None:
        """Take metrics that show those of the front-ends, too. Raises StartupError for keys or certificates."""
        read_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)  # a wrong one is named once
        self.frontends: list[Frontend] = []
        self.exchange = Exchange(files.slots, settings.max_concurrent_requests)
        self._settings = settings
        self._files = files
        self._metrics = metrics
        self._device = device
        self._has_keys = bool(settings.api_keys())
        self._keepers: list[asyncio.Task[None]] = []
        self._loading: list[asyncio.Task[Any]] = []
        self._ports = ExitStack()

    async def start(self) -> Addresses:
        """See Server."""
        settings = self._shares(self._ports.enter_context(reserve(self._settings)))
        try:
            for number in range(settings.frontends):
                frontend = Frontend(Job(settings, number, self._files), self.exchange)
                await frontend.start()
                self.frontends.append(frontend)
            for frontend in self.frontends:
                await frontend.wait_until(frontend.connection.listening)
        except StartupError:
            await self.stop()
            raise
        return addresses_of(settings)

    async def load(self, addresses: Addresses) -> None:
        """See Server."""
        notices.announce_listening(addresses, self._settings, has_keys=self._has_keys)
        with loading_errors(self._settings):
            info = await self._load_all()
        self._keepers = [asyncio.create_task(frontend.keep()) for frontend in self.frontends]
        self._metrics.describe(info)
        notices.announce_serving(addresses, self._settings, info, has_keys=self._has_keys)

    def reload(self) -> None:
        """See Server."""
        self.exchange.tell(Reload())

    async def stop(self) -> bool:
        """See Server."""
        for task in (*self._loading, *self._keepers):
            task.cancel()
        if self._keepers:  # otherwise they do not serve
            self.exchange.tell(Drain())
            seconds = self._settings.shutdown_delay + self._settings.shutdown_grace + LATE_SECONDS
            await asyncio.wait([frontend.ended for frontend in self.frontends], timeout=seconds)
        for frontend in self.frontends:
            await frontend.kill()
        self.exchange.close()
        self._ports.close()
        return self._device is None or await self._device.stop()

    def _shares(self, listeners: dict[str, object]) -> Settings:
        """What each front-end is told: the ports that are held, and its share of the connections."""
        settings = self._settings
        if settings.max_connections is not None:
            listeners["max_connections"] = max(1, settings.max_connections // settings.frontends)
        return settings.model_copy(update=listeners)

    async def _load_all(self) -> Info:
        """The model here, and beside it all that front-ends need."""
        loading = asyncio.create_task(self._load())
        self._loading = [loading, *(asyncio.create_task(frontend.become_ready()) for frontend in self.frontends)]
        await asyncio.gather(*self._loading)
        return loading.result()

    async def _load(self) -> Info:
        settings = self._settings
        checkpoint = await asyncio.to_thread(hub.fetch, settings)
        self.exchange.locate(checkpoint)
        model = await asyncio.to_thread(read_model_config, checkpoint.folder, settings)
        self._metrics.serve_model(model.max_input_length)
        if self._device is None:
            self._device = Worker(model, settings, self._metrics)
        facts = await self._device.start(self.exchange.deliver, self.exchange.follow)
        self.exchange.open(self._device, facts, model.max_input_length)
        return describe(settings, model, facts, sha=checkpoint.sha, tokenization_workers=count_workers(settings))
