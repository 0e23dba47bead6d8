"""torch.compile over the kernels."""

import pytest
from gpu.training_bodies import check_compiled

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("default")  # Inductor warns about the machine: tf32, online softmax
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_whole_graph(backend):
    check_compiled("cuda", backend)
