"""What a record must do, kind by kind; :mod:`rpeg_core.testing.conformance` runs these lists."""
