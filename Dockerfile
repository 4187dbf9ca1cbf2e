# Gristmill's worker and command. Without more PyTorch is the one of the usual index (on x86: for CUDA, gigabytes more);
# give --build-arg TORCH_INDEX=ADDRESS, that of PyTorch's index of CPU builds, for the small one.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/gristmill
ENV PATH=/opt/gristmill/bin:$PATH
WORKDIR /src
# The largest layer by far, so it comes before everything that changes.
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY engine engine
COPY jobs jobs
COPY worker worker
COPY migrations migrations
COPY gristmill gristmill
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} .

FROM python:${PYTHON}-slim
# g++ compiles the kernels for the machine's own CPU, once, when a worker first loads a model.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --system --create-home --uid 10001 gristmill \
    && install -d -o gristmill -g gristmill /var/cache/gristmill
COPY --from=build /opt/gristmill /opt/gristmill
# XDG_CACHE_HOME holds the compiled kernels and the copies of models that come from S3: keep it on a volume.
ENV PATH=/opt/gristmill/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/var/cache HF_HUB_OFFLINE=1
USER gristmill
WORKDIR /home/gristmill
STOPSIGNAL SIGTERM
ENTRYPOINT ["gristmill"]
CMD ["--help"]
