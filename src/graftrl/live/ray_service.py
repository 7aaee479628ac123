"""A named, detached Ray actor that whoever comes first starts.

When it dies, the next call starts another, empty one; every job then publishes its last step again. Where the cluster
itself is away, calls raise Unreachable, and a connection is tried again after a while.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Hashable, Iterator
from typing import Any

from graftrl.errors import ConfigError
from graftrl.live import held
from graftrl.live.service import Unreachable

NAMESPACE = "graftrl"
DEFAULT_NAME = "graftrl-exchange"
_CALL_S = 30.0  # most seconds for one call; starting the actor takes the most
_ATTEMPTS = 4  # to connect when a run starts
_KNOCK_S = 3.0  # for a client server to take a connection
_RETRY_S = 20.0  # between two attempts to connect


class RayService:
    """A service of exchange on a Ray cluster.

    Args:
        address: HOST:PORT or "auto" of a cluster that this machine belongs to; ray://HOST:PORT of the client server of
            any cluster. Where this process is connected to Ray already, that cluster is meant, except for ray://.
        name: of the actor.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, address: str, name: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("peers on Ray need the package ray: pip install 'graftrl[ray]'")
        import ray

        self._ray: Any = ray
        self.address, self.name = address, name
        self.where = f"the exchange {name!r} on Ray at {address}"
        self._client: Any = None  # a connection by ray://
        self._started = False  # whether this process's own connection is ours to end
        self._actor: Any = None
        self._instance = ""
        self._last: dict[str, tuple[int, bytes, int]] = {}  # per model, what we published last
        self._not_before = 0.0

    def place(self, model: str, step: int) -> str:
        return f"{self.where}, {model!r} in step {step}"

    def open(self) -> None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._call("look", "")
                return
            except Unreachable:  # a busy cluster may take longer to start what answers us than Ray gives it
                if not left:
                    raise
                time.sleep(_KNOCK_S)
                self._not_before = 0.0

    def look(self, model: str) -> dict[int, Hashable]:
        instance, found = self._call("look", model)
        if instance != self._instance:  # it has lost what it held
            self._instance = instance
            for ours, (step, content, keep) in self._last.items():
                self._call("publish", ours, step, content, keep)
            _, found = self._call("look", model)
        return dict(found)

    def fetch(self, model: str, step: int) -> bytes | None:
        content: bytes | None = self._call("fetch", model, step)
        return content

    def publish(self, model: str, step: int, content: bytes, keep: int) -> None:
        self._last[model] = step, content, keep
        self._call("publish", model, step, content, keep)

    def drop(self, model: str, steps: list[int]) -> None:
        self._call("drop", model, steps)

    def close(self) -> None:
        self._actor = None
        if self._client is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._client.disconnect()
            self._client = None
        if self._started:
            self._ray.shutdown()
            self._started = False

    # Calls ----------------------------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> Any:
        errors = self._ray.exceptions
        try:
            with self._connected():
                return self._ray.get(getattr(self._find(), method).remote(*arguments), timeout=_CALL_S)
        except errors.RayTaskError:
            raise
        except (errors.RayError, OSError, RuntimeError, ValueError) as error:
            self._actor = None
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[-1].strip()}"
            raise Unreachable(f"{self.where} does not answer: {reason}") from error

    def _find(self) -> Any:
        if self._actor is None:
            self._ray.cloudpickle.register_pickle_by_value(held)
            actor = self._ray.remote(held.Held).options(
                name=self.name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
            )
            self._actor = actor.remote()
        return self._actor

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        client = self.address.startswith("ray://")
        if client and self._client is not None and not self._client_lives():
            self.close()
        if (client and self._client is None) or not (client or self._ray.is_initialized()):
            self._connect(client)
        with self._client if client else contextlib.nullcontext():
            yield

    def _connect(self, client: bool) -> None:
        if time.monotonic() < self._not_before:
            raise ConnectionError(f"no Ray cluster answers there; tried again every {_RETRY_S:g} s")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            if client:
                host, port = self.address.removeprefix("ray://").rsplit(":", 1)
                socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()  # Ray itself tries for long
                self._client = self._ray.init(self.address, namespace=NAMESPACE, allow_multiple=True)
            else:
                self._ray.init(
                    self.address, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False,
                    configure_logging=False,
                )  # fmt: skip
                self._started = True
        except (OSError, RuntimeError, ValueError):
            self._not_before = time.monotonic() + _RETRY_S
            raise

    def _client_lives(self) -> bool:
        with self._client:
            return bool(self._ray.util.client.ray.is_connected())
