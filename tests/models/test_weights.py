import pickle
import struct
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import multilinear as ml
from multilinear.models import ReleasedWeightsWarning, from_release, read_header


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ml.create("monet_micro", in_chans=1, norm="batch").eval()


@pytest.fixture
def saved(model, tmp_path):
    return ml.save(model, tmp_path / "net.safetensors", labels=list("abcdefghij"))


def test_header_rebuilds_the_model(model, saved):
    again = ml.load(saved)
    assert again.config == model.config
    assert read_header(saved)["labels"] == list("abcdefghij")
    image = torch.randn(2, 1, 28, 28)
    assert torch.equal(again(image), model(image))
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_a_model_made_by_hand_round_trips(tmp_path):
    model = ml.MONet(widths=(8, 12), depths=(1, 1), patches=(4, 2), num_classes=3, fuse="concat", border="zero").eval()
    again = ml.load(ml.save(model, tmp_path / "own.safetensors"))
    image = torch.randn(1, 3, 16, 16)
    assert torch.equal(again(image), model(image))


def test_a_new_classifier_is_saved_too(model, tmp_path):
    model.reset_classifier(4)
    assert ml.load(ml.save(model, tmp_path / "net.safetensors")).num_classes == 4


def test_timm_loads_a_local_folder_and_the_hub(model, tmp_path, monkeypatch):
    preprocessing = {"input_size": (1, 28, 28), "mean": (0.25,), "std": (0.5,)}
    folder = ml.save(model, tmp_path / "hub", labels=list("abcdefghij"), preprocessing=preprocessing)
    image = torch.randn(1, 1, 28, 28)
    local = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert list(local.pretrained_cfg["mean"]) == [0.25]
    torch.testing.assert_close(local(image), model(image))
    # the layout of the hub's download cache, as if somebody had pulled the model before going offline
    cache = tmp_path / "cache"
    snapshot = cache / "models--someone--monet" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (snapshot / file).write_bytes((folder / file).read_bytes())
    refs = cache / "models--someone--monet" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = timm.create_model("hf-hub:someone/monet", pretrained=True, cache_dir=str(cache)).eval()
    torch.testing.assert_close(hub(image), model(image))


class TestRefusals:
    def test_missing_file(self, tmp_path):
        with pytest.raises(ml.MultilinearError, match="no weights file at"):
            ml.load(tmp_path / "none.safetensors")

    @pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
    def test_truncated_file(self, saved, keep):
        data = saved.read_bytes()
        saved.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
        with pytest.raises(ml.MultilinearError, match="not a readable safetensors file, perhaps truncated"):
            ml.load(saved)

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_pickle(self, tmp_path, protocol):
        path = tmp_path / "evil.safetensors"
        path.write_bytes(pickle.dumps({"weight": 1}, protocol=protocol))
        with pytest.raises(ml.MultilinearError, match="is a pickle, which could run code"):
            ml.load(path)

    def test_torch_checkpoint(self, model, tmp_path):
        path = tmp_path / "model.pth"
        torch.save(model.state_dict(), path)
        with pytest.raises(ml.MultilinearError, match="is a pickle"):
            ml.load(path, model)

    def test_checkpoint_of_another_model(self, saved):
        with pytest.raises(ml.MultilinearError, match="checkpoint of another model: it has no 'stages.0.blocks.3"):
            ml.load(saved, ml.create("monet_nano", in_chans=1, norm="batch", widths=(48,)))
        with pytest.raises(ml.MultilinearError, match="'embed.levels.0.weight' has shape .*48, 1, 2, 2.*, not .*96"):
            ml.load(saved, ml.create("monet_nano", in_chans=1, norm="batch"))
        with pytest.raises(ml.MultilinearError, match="it also holds"):
            ml.load(saved, ml.create("monet_micro", in_chans=1, norm="batch", depths=(2,)))

    def test_foreign_safetensors(self, tmp_path):
        path = tmp_path / "other.safetensors"
        save_file({"weight": torch.zeros(2)}, path)
        with pytest.raises(ml.MultilinearError, match="has no multilinear header"):
            ml.load(path)

    @pytest.mark.parametrize(
        "header",
        [
            "{",
            "[]",
            '{"version": 1}',
            '{"version": 99, "architecture": "monet_t", "arguments": {}}',
            '{"version": 1, "architecture": "resnet50", "arguments": {}}',
            '{"version": 1, "architecture": "monet_t", "arguments": {"evil": 1}}',
            '{"version": 1, "architecture": "monet_t", "arguments": {"widths": "wide"}}',
            '{"version": 1, "architecture": "monet_t", "arguments": {"depths": [1000000000]}}',
            '{"version": 1, "architecture": "monet_t", "arguments": {"depths": [-3]}}',
            '{"version": 1, "architecture": "monet_t", "arguments": {"depths": {}, "widths": [null]}}',
        ],
    )
    def test_damaged_header(self, tmp_path, header):
        path = tmp_path / "bad.safetensors"
        save_file({"weight": torch.zeros(2)}, path, {"multilinear": header})
        with pytest.raises(ml.MultilinearError):
            ml.load(path)

    def test_a_header_that_asks_for_a_giant_allocates_nothing(self, tmp_path):
        path = tmp_path / "giant.safetensors"
        arguments = '{"widths": [1000000], "depths": [1], "patches": [2]}'
        header = f'{{"version": 1, "architecture": "monet_t", "arguments": {arguments}}}'
        save_file({"weight": torch.zeros(2)}, path, {"multilinear": header})
        with pytest.raises(ml.MultilinearError, match="checkpoint of another model"):
            ml.load(path)

    def test_a_length_field_that_lies(self, saved):
        data = saved.read_bytes()
        saved.write_bytes(struct.pack("<Q", 2**62) + data[8:])
        with pytest.raises(ml.MultilinearError, match="not a readable safetensors file"):
            ml.load(saved)


def test_a_full_disk_loses_nothing(model, saved, monkeypatch):
    before = saved.read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multilinear.models.weights.save_file", full)
    with pytest.raises(
        ml.MultilinearError, match="could not write .*No space left.*nothing that was there before is lost"
    ):
        ml.save(model, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def release_names(state):
    """Our multi-stage weights under the names of the authors' release, where stages and reductions interleave."""
    letters = {"A": "U1", "D": "U2", "B": "U3", "C": "C", "norm_a": "norm1", "norm_b": "norm3", "alpha": "alpha"}
    renamed = {}
    for key, value in state.items():
        part = key.split(".")
        if key.startswith("embed.levels.0"):
            name = f"fs.{part[-1]}"
        elif key.startswith("embed.reduce.0"):
            name = f"fs2.{part[-1]}"
        elif key.startswith("head"):
            name = f"head.1.{part[-1]}"
        elif part[2] == "downsample":
            name = f"network.{2 * int(part[1]) - 1}.proj.{part[-1]}"
        else:
            start = f"network.{2 * int(part[1])}.model.{part[3]}.0."
            if part[4] == "norm1":
                name = start + f"norm.{part[-1]}"
            else:
                inside = [letters.get(p, p) for p in part[5:]]
                name = start + ".".join([{"mu1": "mlp1", "mu2": "mlp2"}[part[4]], *inside])
        renamed[name] = value.reshape(()) if name.endswith("alpha") else value
    return renamed


class TestRelease:
    def test_converts_the_authors_names(self):
        model = ml.create("monet_ms_t", depths=(1, 1, 1, 1)).eval()
        state = model.state_dict()
        with pytest.warns(ReleasedWeightsWarning, match="in-place shift, a race on GPUs"):
            converted = from_release({f"module.{key}": value for key, value in release_names(state).items()})
        assert converted.keys() == state.keys()
        assert all(torch.equal(converted[key], state[key]) for key in state)

    def test_timm_loads_a_released_checkpoint(self, tmp_path):
        source = ml.create("monet_ms_t", depths=(1, 1, 1, 1)).eval()
        save_file(release_names(source.state_dict()), tmp_path / "release.safetensors")
        overlay = {"file": str(tmp_path / "release.safetensors")}
        with pytest.warns(ReleasedWeightsWarning):
            model = timm.create_model(
                "monet_ms_t", depths=(1, 1, 1, 1), pretrained=True, pretrained_cfg_overlay=overlay
            )
        image = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(model.eval()(image), source(image))

    def test_our_own_names_pass_through(self, saved):
        state = load_file(Path(saved))
        assert from_release(state).keys() == state.keys()

    def test_a_surprise_is_named(self):
        with (
            pytest.warns(ReleasedWeightsWarning),
            pytest.raises(ml.MultilinearError, match="unexpected weight 'what.is'"),
        ):
            from_release({"fs.weight": torch.zeros(1), "what.is": torch.zeros(1)})
