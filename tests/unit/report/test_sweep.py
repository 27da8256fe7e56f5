"""The table and the picture of a sweep."""

from __future__ import annotations

from megatron.optimus.report.sweep import SweepRow, panel, table


def test_table_and_picture_of_options_that_are_no_numbers() -> None:
    found = [
        SweepRow({"optimizer": name, "qk_layernorm": norm}, "done", 10, loss, valid)
        for name, norm, loss, valid in [
            ("adam", "true", 3.0, 3.5), ("muon", "true", 2.0, 3.6), ("adam", "false", 1.0, 3.7), ("lion", "true", 2, 4)
        ]
    ]  # fmt: skip
    assert [line.split()[0] for line in table(found)].index("*") == 1  # by the validation loss
    drawn = panel(found)
    assert drawn.tick_labels == ("adam", "muon", "lion") and not drawn.is_log_x
    assert drawn.lines["qk_layernorm=true"] == ([0.0, 1.0, 2.0], [3.5, 3.6, 4])
