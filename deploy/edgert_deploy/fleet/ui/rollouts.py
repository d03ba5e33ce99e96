"""How far rollouts came, as their files on this host say it (`edgert rollout status`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from edgert_deploy.campaign import RUNNING, Campaign, CampaignStore

SHOWN_MAX = 20
DEVICES_SHOWN_MAX = 200  # of those that did not take it
CUT_OFF = "cut off"


class Rollouts:
    """The newest rollouts in `folder`. The folder need not exist. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = CampaignStore(folder)
        self.revision = 0
        self.shown: list[dict[str, Any]] = []

    def look(self) -> None:
        """Read what has changed; `revision` grows where something has."""
        found = [self._rollout(campaign) for campaign in self._store.all()[:SHOWN_MAX]] if self._folder.is_dir() else []
        if found != self.shown:
            self.shown = found
            self.revision += 1

    def _rollout(self, campaign: Campaign) -> dict[str, Any]:
        names = campaign.devices
        results = {name: str(campaign.outcomes.get(name, {}).get("result", "held")) for name in names}
        failed = [
            {"device": name, "result": results[name], "error": campaign.outcomes[name].get("error")}
            for name in names
            if name in campaign.outcomes and not campaign.took(name)
        ]
        return {
            "id": campaign.id,
            "model": campaign.model,
            "version": f"r{campaign.release}",
            "state": self._state(campaign),
            "reason": campaign.reason,
            "started_ms": int(campaign.started_at * 1000),
            "devices": len(names),
            "took": sum(campaign.took(name) for name in names),
            "failed": failed[:DEVICES_SHOWN_MAX],
            "failed_count": len(failed),
            "waves": [_wave(campaign, wave) for wave in campaign.strategy.split(len(names))],
        }

    def _state(self, campaign: Campaign) -> str:
        """As it is: one that says that it runs, and that nobody works on, was cut off."""
        try:
            cut_off = campaign.state == RUNNING and not self._store.is_at_work(campaign.id)
        except ConfigInvalid:  # a folder that may only be read: what the file says is all that is known
            return campaign.state
        return CUT_OFF if cut_off else campaign.state


def _wave(campaign: Campaign, wave: range) -> dict[str, int]:
    names = [campaign.devices[i] for i in wave]
    tried = sum(name in campaign.outcomes for name in names)
    took = sum(campaign.took(name) for name in names)
    return {"devices": len(names), "took": took, "failed": tried - took, "left": len(names) - tried}
