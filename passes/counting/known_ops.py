"""ATen ops that multiply no matrices: their cost is what they read and write. Pointwise ops are known by their tag and not listed."""

from __future__ import annotations

from typing import Any

import torch


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{n}" for n in names.split())


POINTWISE = _aten("""
    leaky_relu leaky_relu_ floor_divide floor_divide_ polar complex linalg_cross addr addr_ masked_fill masked_fill_
    threshold_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_backward hardtanh_backward hardsigmoid_backward mish_ hardswish hardswish_
    hardswish_backward elu_backward hardshrink_backward leaky_relu_backward log_sigmoid_forward log_sigmoid_backward softplus_backward softshrink_backward
    _prelu_kernel _prelu_kernel_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    soft_margin_loss soft_margin_loss_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
""")  # that PyTorch does not tag, or not yet in 2.11
REDUCE = _aten("""
    sum nansum mean var var_mean std std_mean amax amin aminmax max min argmax argmin prod norm linalg_vector_norm logsumexp cumsum cumprod any all
    count_nonzero median kthvalue logcumsumexp trace histc renorm _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward cummax cummin mode isin searchsorted bucketize _unique2
    scatter_reduce scatter_reduce_ index_reduce index_reduce_ _embedding_bag _embedding_bag_forward_only _embedding_bag_backward
    _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
""")
NORMALISE = _aten("""
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _batch_norm_with_update _batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward native_dropout native_dropout_backward
    _weight_norm_interface _weight_norm_interface_backward
""")
MOVE = _aten("""
    cat stack copy copy_ clone contiguous _to_copy slice_backward select_backward slice_scatter select_scatter diagonal_backward as_strided_scatter
    index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put index_select index_add index_add_ gather scatter scatter_ scatter_add
    scatter_add_ embedding embedding_dense_backward masked_scatter masked_select tril triu roll flip repeat constant_pad_nd
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward replication_pad1d
    replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward index_fill index_fill_
    unfold_backward im2col col2im pixel_shuffle
    pixel_unshuffle channel_shuffle native_channel_shuffle topk sort one_hot bincount nonzero split_with_sizes_copy expand_copy detach_copy lift_fresh_copy
    diagonal_scatter as_strided_copy view_copy repeat_interleave put put_ diag_embed rot90 nonzero_static masked_scatter_backward
""")
RESAMPLE = _aten("""
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest1d
    upsample_nearest2d upsample_nearest2d_backward upsample_bicubic2d upsample_bicubic2d_backward _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    grid_sampler_2d grid_sampler_2d_backward glu glu_backward max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d_backward
    fractional_max_pool2d fractional_max_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
    upsample_nearest1d_backward upsample_nearest3d upsample_nearest3d_backward upsample_linear1d upsample_linear1d_backward upsample_trilinear3d
    upsample_trilinear3d_backward _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward
""")
MAKE = _aten("""
    fill fill_ zero_ zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange linspace eye scalar_tensor rand randn rand_like
    tril_indices triu_indices randn_like randint randint_like bernoulli bernoulli_ uniform_ normal_ exponential_ random_ randperm
""")
OURS = frozenset({"fxmask.nm_learned", "fxmask.nm_sr_ste", "fxmask.nm_magnitude", "fxmask.graft"})  # W∘M of N:M masks, and of convolutions
KNOWN = OURS | POINTWISE | REDUCE | NORMALISE | MOVE | RESAMPLE | MAKE
# a view of a constant, such as a cached mask, is another tensor on fake ones: unsqueeze is the first that a mask sees
NOTHING = _aten("""
    empty empty_like empty_strided new_empty new_empty_strided _assert_async _assert_tensor_metadata _linalg_check_errors resize_ lift_fresh
    as_strided_ transpose_ t_ swapaxes_ swapdims_ squeeze_ unsqueeze_ detach_ unsqueeze
""")
BAGS = _aten("_embedding_bag _embedding_bag_forward_only")  # read a row of their first operand for each index, and give sums of them
GATHERS = _aten("embedding index index_select gather _unsafe_index")  # read what they give of their first operand
OVERWRITES = _aten("copy_ fill_ zero_ bernoulli_ uniform_ normal_ exponential_ random_")  # write an argument without reading it
SUMS = _aten("index_add_ scatter_add_ scatter_reduce_")  # add to what is there
ELEMENTS = _aten("scatter_ scatter_add_ scatter_reduce_")  # an element of the first argument for each of the index
SCATTERS = SUMS | ELEMENTS | _aten("index_put_ index_copy_ index_fill_")  # write parts of their first argument
KEEP_ELEMENTS = _aten("""
    _to_copy clone copy copy_ contiguous flip roll tril triu index index_select gather embedding cat stack repeat constant_pad_nd sort native_dropout
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
""")  # whose results have the elements of an argument, or nearly so, or 0 in their place
NUMBERS = {"aten.zeros": 0, "aten.new_zeros": 0, "aten.zeros_like": 0, "aten.ones": 1, "aten.new_ones": 1, "aten.ones_like": 1}  # all that an op gives
FULL = {"aten.scalar_tensor": "s"} | dict.fromkeys(("aten.full", "aten.full_like", "aten.new_full"), "fill_value")
COPIES = {"aten._to_copy", "aten.clone", "aten.lift_fresh_copy"}


def is_pointwise(call: Any) -> bool:
    """Whether an op computes each element of what it gives by itself."""
    return call.op in POINTWISE or torch.Tag.pointwise in getattr(call.func, "tags", ())


def number_made(call: Any) -> float | None:
    """The number that each element of what a call gives is, where the op says so."""
    if call.op in NUMBERS:
        return NUMBERS[call.op]
    if call.op in FULL:
        return call.named[FULL[call.op]]
    if call.op != "aten.sub" and call.op not in COPIES and not call.aliases:
        return None
    inputs: list[Any] = call.inputs
    if call.op == "aten.sub":
        return 0 if len(inputs) == 2 and not call.kwargs and inputs[0].view == inputs[1].view else None
    return inputs[0].number if len(inputs) == 1 else None
