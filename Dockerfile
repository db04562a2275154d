# batchgen in a container, for machines with an NVIDIA GPU (CUDA 13, driver 580 or newer) and for machines without:
#
#   docker build --target gpu -t batchgen:gpu .
#   docker build --target cpu -t batchgen:cpu .
#   docker run --rm --gpus all -v "$PWD:/work" --user "$(id -u):$(id -g)" batchgen:gpu run job.yaml
#
# The image for GPUs runs on a CPU too; the other one is some gigabytes smaller where the build argument
# PIP_EXTRA_INDEX_URL names torch's own index of CPU builds. `docker stop` sends SIGTERM: the job
# saves its work and ends with exit code 75; give it time to (`docker stop --timeout 30`).
# PIP_INDEX_URL and PIP_EXTRA_INDEX_URL may be given as build arguments.

# The wheel is made on the older system of the two, so that its library loads on both.
FROM python:3.12.11-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY batchgen batchgen
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# torch brings CUDA's libraries itself. Triton compiles its launchers when it runs: a C compiler, Python's headers.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/batchgen
ENV PATH=/opt/batchgen/bin:$PATH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements-image.txt /opt/
# Layers by how seldom they change: torch, other packages, batchgen.
RUN pip install --no-cache-dir -c /opt/requirements-image.txt torch
# hadolint ignore=DL3059
RUN pip install --no-cache-dir -r /opt/requirements-image.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl \
 && pip check
RUN useradd --create-home --uid 10001 batchgen
USER 10001
WORKDIR /work
ENTRYPOINT ["batchgen"]

FROM python:3.12.11-slim-bookworm AS cpu
RUN python3 -m venv /opt/batchgen
ENV PATH=/opt/batchgen/bin:$PATH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements-image.txt /opt/
RUN pip install --no-cache-dir -c /opt/requirements-image.txt torch
# hadolint ignore=DL3059
RUN pip install --no-cache-dir -r /opt/requirements-image.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl \
 && pip check
RUN useradd --create-home --uid 10001 batchgen
USER 10001
WORKDIR /work
ENTRYPOINT ["batchgen"]
