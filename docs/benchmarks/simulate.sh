#!/bin/sh
# The simulations of simulate.md. AZURE: the folder of AzureLLMInferenceTrace_conv.csv (Azure's
# public data set, 2023); MOONCAKE: that of conversation_trace.jsonl (Mooncake, FAST25 release).
set -eu
cd "$(dirname "$0")"
conv="--trace $AZURE/${CONV:-AzureLLMInferenceTrace_conv.csv} --max-queue-len none"
slo="--slo-ttft-ms 2000 --slo-itl-ms 100"

sim() {
    echo "\$ llmjax simulate $*"
    llmjax simulate "$@"
    echo
}

# Memory beside the baselines, at saturation.
h100="$conv --num-requests 4000 --request-rate 60 --max-num-seqs 512 --prefill-chunk-size 2048"
sim $h100 --baselines --plot simulate-h100.png
sim $conv --device a100-80gb --model llama-2-13b --num-requests 2000 --request-rate 30 \
    --prefill-chunk-size 2048 --baselines --plot simulate-a100.png
sim $conv --device l4 --num-requests 1000 --request-rate 5 --baselines
sim $conv --device l4 --num-requests 1000 --request-rate 10 --weight-dtype int8
for chunk in 2048 8192; do
    sim --trace $MOONCAKE/conversation_trace.jsonl --max-queue-len none --model llama-3.1-8b \
        --num-requests 1500 --prefill-chunk-size $chunk
done

# Goodput by rate.
for rate in 8 16 20 24; do
    sim $conv --num-requests 2000 --request-rate $rate $slo --baselines
done

# What limits an H100: step sizes.
most="$conv --num-requests 3000 --request-rate 60"
sim $most
for chunk in 512 2048 7680; do
    sim $most --max-num-seqs 512 --prefill-chunk-size $chunk
done

# The forecast, and preemption by computing again and by swapping.
a100="$conv --device a100-80gb --model llama-2-13b --num-requests 1000 --request-rate 30 \
    --prefill-chunk-size 2048"
l4="--device l4 --request-rate 20 --num-requests 1000 --input-len 100 --output-len 500 \
    --length-spread 0.9 --max-queue-len none"
for how in "" "--forecast-margin 0" "--forecast-margin none" --known-lengths; do
    sim $a100 $how
    sim $l4 $how
done
for space in 0 16; do
    sim $l4 --forecast-margin none --swap-space $space
done

# The prefix cache.
moon="--model llama-3.1-70b --tensor-parallel-size 8 --trace $MOONCAKE/conversation_trace.jsonl \
    --num-requests 3000 --rate-scale 0.4 --prefill-chunk-size 2048"
sim $moon --no-enable-prefix-caching
sim $moon
sim $moon --kv-offloading-size 1000 --plot simulate-mooncake.png

# What scheduling costs.
sim $conv --num-requests 10000 --request-rate 60 --max-num-seqs 512 --prefill-chunk-size 7680

# How many H100s.
sim $conv --num-requests 3000 --request-rate 60 --capacity --p99-ttft-ms 500
