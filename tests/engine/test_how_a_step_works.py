"""docs/design/step.md names the functions of a settled step through the Trainer, in the order in which they are first called."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_mfsdp
from lightning import LightningModule
from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import make_trainer, strict_warnings

PACKAGE = f"{Path(lightning_mfsdp.__file__).parent}/"
PAGE = Path(__file__).resolve().parents[2] / "docs/design/step.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Model(LightningModule):
    """Its last batch is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 1)
        self.called: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.called[f"{file.removeprefix(PACKAGE)}: {frame.f_code.co_qualname}"] = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == self.trainer.num_training_batches - 1:
            sys.setprofile(self.note)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def called(rank: int, world: int) -> list[str]:
    strict_warnings()
    strategy = MFSDPStrategy(units=[Block])
    options = {"strategy": strategy, "precision": "bf16-mixed", "gradient_clip_val": 1.0}
    model, trainer = Model(), make_trainer(tempfile.gettempdir(), world, **options)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8 * world, 8), batch_size=2))
    return list(model.called)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 code does not know its qualified name")
def test_functions_are_called_in_the_order_of_the_page() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py: [\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 40
    for found in run_distributed(called, 2):
        missing = [one for one in listed if one not in found]
        assert not missing, "not called in a settled step"
        assert sorted(listed, key=found.index) == listed
