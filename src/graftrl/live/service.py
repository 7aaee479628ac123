"""Where jobs meet: what a service of exchange does, whatever carries it."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Protocol

from graftrl.errors import ConfigError, RunError


class Unreachable(RunError):
    """The service does not answer. A job goes on alone, and asks again."""


class Service(Protocol):
    """Holds the last few steps of every model. A step that is published again replaces what was there.

    Attributes:
        where: for messages.

    Every method raises Unreachable where the service does not answer.
    """

    where: str

    def open(self) -> None:
        """Once, before anything else."""
        ...

    def look(self, model: str) -> dict[int, Hashable]:
        """The steps that are held, each with a mark that changes when it is published anew. No order is in it."""
        ...

    def fetch(self, model: str, step: int) -> bytes | None:
        """What was published, as a whole; None if it is not held (any more)."""
        ...

    def publish(self, model: str, step: int, content: bytes, keep: int) -> None:
        """Make `content` the model's step; of the steps up to this one only the last `keep` stay."""
        ...

    def drop(self, model: str, steps: list[int]) -> None: ...

    def place(self, model: str, step: int) -> str:
        """What a message calls a model's step."""
        ...

    def close(self) -> None: ...


def open_service(live: str, ray_address: str | None) -> Service:
    """The service of a recipe's `live`. Nothing is contacted yet.

    Args:
        ray_address: of the cluster that "ray" means.

    Raises:
        ConfigError: it needs Ray, which is missing or has no address.
    """
    if live.split("/")[0] not in ("ray", "ray:"):
        from graftrl.live.folder import SharedFolder

        return SharedFolder(Path(live))
    from graftrl.live.ray_service import DEFAULT_NAME, RayService

    if live.startswith("ray://"):
        from graftrl.live.client_process import ClientProcess

        place, _, name = live.removeprefix("ray://").partition("/")
        return ClientProcess(f"ray://{place}", name or DEFAULT_NAME)
    if ray_address is None:
        raise ConfigError(f"live: {live} needs ray.address, the cluster that both jobs reach")
    return RayService(ray_address, live.partition("/")[2] or DEFAULT_NAME)
