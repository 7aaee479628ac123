"""The live peers of a run: its groups are published, the peers' are received and recorded.

    RUN/received/step-000004.parquet    what step 4 got from live peers; without rows where it went on alone

The record is a rollout log. A resumed run takes what the steps after its checkpoint got from there, so that it repeats
them exactly although the peers have gone on.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from graftrl.errors import DataError
from graftrl.live.content import pack
from graftrl.live.service import Service, Unreachable, open_service
from graftrl.live.sides import Listener, Publisher, Received, steps_kept
from graftrl.logs.config import AnyPeerSettings, LivePeerSettings
from graftrl.logs.reader import RolloutLog, check_file
from graftrl.logs.rollouts import rollout_frame, write_frame
from graftrl.policies.config import SamplingSettings
from graftrl.rollout import Group, Prompt
from graftrl.training.run_folder import RunFolder

KIND = "received"


@dataclass
class _Place:
    """Where some of the peers are met."""

    service: Service
    publisher: Publisher
    listeners: dict[str, Listener]


class LivePeers:
    """All live peers of a recipe, possibly none. Jobs that meet at one place are told each step once.

    Args:
        peers: the recipe's section; stored peers in it are left alone. models: that train here.
        run: None for a run that is not recorded, and cannot go on.

    Raises:
        ConfigError: Ray is needed, and missing or without an address.
    """

    def __init__(
        self,
        peers: Mapping[str, AnyPeerSettings],
        models: Sequence[str],
        ray_address: str | None = None,
        run: RunFolder | None = None,
    ) -> None:
        self.settings = {name: of for name, of in peers.items() if isinstance(of, LivePeerSettings)}
        self._models, self._run = list(models), run
        self._places: list[_Place] = []
        identity = self._identity() if self.settings else ""
        known = run is not None and any((run.root / KIND).glob("step-*"))
        for live in dict.fromkeys(of.live for of in self.settings.values()):
            here = {name: of for name, of in self.settings.items() if of.live == live}
            service = open_service(live, ray_address)
            listeners = {
                name: Listener(
                    service, of.model or name, name=name, timeout_s=of.timeout_s, max_staleness=of.max_staleness,
                    known=known,
                )
                for name, of in here.items()
            }  # fmt: skip
            keep = steps_kept(max(of.max_staleness for of in here.values()))
            self._places.append(_Place(service, Publisher(service, identity, keep), listeners))
        self._identity_of_run = identity

    @property
    def summaries(self) -> list[str]:
        """A line for each peer."""
        return [
            f"{name}: {of.model or name} at {of.live}, waits {of.timeout_s:g} s, groups up to {of.max_staleness} steps "
            "old"
            for name, of in self.settings.items()
        ]

    def begin(self, finished_steps: int) -> None:
        """Before the first step, or where the run goes on.

        Raises:
            RunError: a place cannot be reached, or another run publishes there under a name of this one.
        """
        if self._run is not None and not finished_steps:  # of an attempt that got nowhere
            for file in (self._run.root / KIND).glob("step-*"):
                file.unlink()
        for place in self._places:
            place.publisher.begin(self._models, finished_steps)

    def meet(
        self, step: int, run: str, groups: Mapping[str, Sequence[Group]], fingerprints: Mapping[str, str]
    ) -> tuple[dict[str, Received], dict[str, int]]:
        """Publish this step's groups and receive every peer's, in the order of the recipe.

        Args:
            run: the recipe's name. groups: graded. fingerprints: of the models' tokenizers.

        Returns:
            what came from every peer, and the bytes that were published where it is met.

        Raises:
            RunError: another run publishes under a name of this one.
            ConfigError, DataError: what a peer published cannot be used.
        """
        if not self._places:
            return {}, {}
        prompts = {group.prompt.id: group.prompt for of_model in groups.values() for group in of_model}
        content = {
            model: pack(
                model, step, of_model, run=run, fingerprint=fingerprints[model], publisher=self._identity_of_run
            )
            for model, of_model in groups.items()
        }
        published: dict[str, int] = {}
        faults: dict[str, str] = {}
        for place in self._places:
            sent = 0
            try:
                for model, of_model in content.items():
                    place.publisher.publish(model, step, of_model)
                    sent += len(of_model)
            except Unreachable as error:
                faults |= dict.fromkeys(place.listeners, str(error))
            published |= dict.fromkeys(place.listeners, sent)
        found = self._recorded(step, prompts)
        if found is None:
            came = {
                name: listener.receive(step, prompts)
                for place in self._places
                for name, listener in place.listeners.items()
            }
            found = {name: came[name] for name in self.settings}
            self._record(step, run, found)
            for name, fault in faults.items():
                found[name].notes.append(f"peer {name}: this step was not published: {fault}")
        return found, published

    def close(self) -> None:
        for place in self._places:
            place.service.close()

    # The record -----------------------------------------------------------------------------------------------------

    def _record(self, step: int, run: str, found: Mapping[str, Received]) -> None:
        if self._run is None:
            return
        frame = rollout_frame(
            run=run,
            step=step,
            groups={name: received.groups for name, received in found.items()},
            sampling=SamplingSettings(),
            fingerprints={name: received.fingerprint for name, received in found.items()},
        )
        traffic = {name: {"waited_s": of.waited_s, "bytes": of.bytes, "notes": of.notes} for name, of in found.items()}
        write_frame(self._run.step_file(KIND, step), frame, received=traffic)

    def _recorded(self, step: int, prompts: Mapping[str, Prompt]) -> dict[str, Received] | None:
        """What the step got before this run was cut off; None if it did not get so far."""
        if self._run is None or not (file := self._run.step_file(KIND, step)).exists():
            return None
        check_file(file)
        traffic: dict[str, Any] = json.loads(pl.read_parquet_metadata(file)["graftrl"]).get("received", {})
        if set(traffic) != set(self.settings):
            return None  # the recipe was changed
        found = {
            name: Received(waited_s=of["waited_s"], bytes=of["bytes"], notes=of["notes"])
            for name, of in traffic.items()
        }
        if not pl.scan_parquet(file).select(pl.len()).collect().item():
            return found
        log = RolloutLog(file)
        for name in log.models:
            keys = {q: (at, q) for at, q in log.group_index(name).select("step", "prompt_id").iter_rows()}
            missing = next((q for q in keys if q not in prompts), None)
            if name not in found or missing is not None:
                raise DataError(
                    f"{file}: is not of this step (it holds {name!r} on the prompt {missing!r}); remove this file, and "
                    "the step meets its peers anew"
                )
            of_peer = log.groups(name, [keys[q] for q in prompts if q in keys])
            found[name].groups = [
                Group(name, prompts[q], group.responses, log_step=at) for (at, q), group in of_peer.items()
            ]
            only = log.fingerprints(name)
            found[name].fingerprint = (only.pop() or "") if len(only) == 1 else ""
        return {name: found[name] for name in self.settings}

    def _identity(self) -> str:
        """Who publishes: the same when the run goes on."""
        if self._run is None:
            return uuid.uuid4().hex
        file = self._run.root / KIND / "publisher"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex)
        return file.read_text().strip()


def live_metrics(received: Received, step: int, published: int) -> dict[str, Any]:
    """What a step's line says about a live peer besides its groups."""
    ages = [step - group.log_step for group in received.groups if group.log_step is not None]
    return {
        "alone": int(received.alone),
        "waited_s": received.waited_s,
        "staleness": max(ages) if ages else None,
        "bytes_received": received.bytes,
        "bytes_published": published,
    }
