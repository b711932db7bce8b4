"""Ways in which a layer may attend, beyond the plain one."""

from nanovllm_extras.models.masking import AttentionOptions

OPTIONS = {
    "window of one": AttentionOptions(window=1),
    "window": AttentionOptions(window=7),
    "wide window": AttentionOptions(window=40),
    "soft-cap": AttentionOptions(softcap=0.7),
    "all": AttentionOptions(scale=0.4, window=18, softcap=1.5),
}
SINKS = {  # a `Step` draws their values
    "sinks": AttentionOptions(has_sinks=True),
    "all and sinks": AttentionOptions(scale=0.4, window=18, softcap=1.5, has_sinks=True),
}
