"""The speed-up that `advise` predicts beside one that was measured on a GPU."""

import json

from benchmarks.advised import main


def test_a_prediction_stands_beside_the_measurement(recorded, tmp_path, capsys):
    details = {"requests": 4, "seen_before": 4, "turns_wait_for_each_other": True}
    figures = [{"name": f"ssd by none, {count} at a time", "value": 1.5, "details": details} for count in (1, 64)]
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"gpu": "NVIDIA H200", "parts": [{"name": "replay", "figures": figures}]}))
    main(["--trace", str(recorded), "--results", str(results)])
    one, many = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (one["at once"], many["at once"], one["measured"]) == (1, 64, 1.5)
    assert many["predicted"] < one["predicted"] < one["without host"] < one["tokens per step"]
    assert many["host, ms a step"] > one["host, ms a step"]
