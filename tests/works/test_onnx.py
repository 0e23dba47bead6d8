"""ONNX: a finalised model goes through torch.onnx, and its file holds the zeros; a masked one is refused there."""

import importlib

import pytest
import torch
from works.twin import MODELS, near, pair, some

import fxmask

pytestmark = [
    pytest.mark.models,  # the exporter's packages come with them
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),  # torch.export's own
]


def exported(model, x, path):
    with torch.no_grad():
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_finalised_model(name, tmp_path):
    make, shape = MODELS[name]
    masked, twin, kept = pair(make().eval())
    path, x = tmp_path / "model.onnx", some(*shape)
    exported(fxmask.finalize(masked), x, path)
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    near(torch.from_numpy(y), twin.eval()(x).detach())
    onnx = importlib.import_module("onnx")
    weights = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer]
    zeros = sorted(int((w == 0).sum()) for w in weights if w.ndim == 2 and (w == 0).any())
    assert zeros == sorted(int((~k).sum()) for k in kept.values())


def test_a_masked_model_is_refused(tmp_path):
    masked, _, _ = pair(MODELS["mlp"][0]().eval())
    with pytest.raises(torch.onnx.OnnxExporterError) as e:
        exported(masked, some(6, 64), tmp_path / "model.onnx")
    assert "fxmask" in f"{e.value} {e.value.__cause__}"
