"""A paged stash: keeps live rows of experts' saved buffers from forward to backward, in pages, without reading their number on the host.

One save, in the order of a step (`moe/saving.py` has the protocol between experts and what saves for them):

    forward      function.py               saves the first projection: `save_to_lend(saver, ctx, ...)`
                 stash.LayerSaver          the saver of one layer: gives it to the stash, and keeps a claim on it in `ctx`
                 stash.RowStash.save       decides when its rows go into pages, and when its originals are released
                 saved_rows.SavedRows      does it: the record of one save, and the stage that its rows are in
                 pages.PageOps             on the device: finds pages and copies rows into them (`kernels.py`, or `reference.py`)
    between      flag.OverflowFlag         all ranks are asked whether some tensor found no pages
    backward     function.py               reads it: `with lent(ctx.saver, ctx, kept) as ...`
                 stash.RowStash.lend       lends the rows, and then begins to fetch those of the save before
                 saved_rows.SavedRows      as pages, or as tensors in original or new memory; then the pages are free
    end of step  stash.RowStash.end_step   pages of claims that no graph holds any longer are freed
                 statistics.Snapshot       the counters are sent to the host
                 sizing                    after the recorded steps, or if there were too few pages: how many there will be

Work on the device runs on the stream of `side_stream.py`; `config.py` has the options, docs/design/moe.md the reasons.
"""

from lightning_mfsdp.moe.stash.config import StashConfig
from lightning_mfsdp.moe.stash.pages import PageKind
from lightning_mfsdp.moe.stash.stash import RowStash
from lightning_mfsdp.moe.stash.statistics import Occupancy, StashStatistics

__all__ = ["Occupancy", "PageKind", "RowStash", "StashConfig", "StashStatistics"]
