"""torchvision imports beside any build of torch, and its absence is said clearly."""

from __future__ import annotations

SHIM = "from torchvision_shim import import_torchvision; "


def test_models_build(torchvision):
    assert torchvision.models.resnet18(weights=None).fc.out_features == 1000


def test_it_is_the_same_module_again(torchvision):
    from torchvision_shim import import_torchvision

    assert import_torchvision() is torchvision


def test_missing_torchvision_says_how_to_install_it(root, fresh_environment):
    environment = fresh_environment(without=("torchvision",))
    script = SHIM + "\ntry: import_torchvision()\nexcept ImportError as error: print(error)"
    said = environment.run("-c", script, cwd=root / "examples").splitlines()
    assert said == [
        "torchvision: expected it installed, got no such package.",
        "  where: the image data sets and models of the examples and tests",
        "  fix: pip install 'fxmask[vision]', or 'torchvision' in the version that belongs to your torch",
    ]
