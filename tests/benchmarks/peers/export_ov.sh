#!/usr/bin/env bash
# Exports PEERS/smollm2-hf for OpenVINO in the weight formats given (fp16 int8 int4); needs optimum-cli on the PATH.
set -euo pipefail
cd "${PEERS:-peers-work}"
export HF_HUB_OFFLINE=1
for format in "${@:-fp16}"; do
    [ -f "ov-$format/openvino_model.xml" ] && continue
    optimum-cli export openvino -m smollm2-hf --task text-generation-with-past --weight-format "$format" "ov-$format"
done
