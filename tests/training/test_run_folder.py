from __future__ import annotations

from pathlib import Path

import pytest

from graftrl.errors import RunError
from graftrl.training.run_folder import RunFolder


def test_a_line_torn_at_the_end_is_left_out_and_one_torn_elsewhere_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_metrics() == []
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]
    run.metrics.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: torn"):
        run.read_metrics()
    run.metrics.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n')
    with pytest.raises(RunError, match="line 2"):
        run.read_metrics()
