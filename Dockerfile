# batchgen in a container.
#
#   docker build -t batchgen .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" batchgen run job.yaml
#
# torch is held to the release that CPU runs are tested with; --build-arg DEVICE=gpu leaves its choice to pip, which
# takes the newest, made for NVIDIA GPUs. PIP_INDEX_URL and PIP_EXTRA_INDEX_URL may be given as build arguments too,
# for example to take a smaller, CPU-only build.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim
ARG DEVICE=cpu
ARG EXTRAS=s3,gcs,azure,hub
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY constraints-cpu.txt /tmp/
COPY --from=build /wheels /wheels
RUN if [ "$DEVICE" = gpu ]; then : > /tmp/constraints-cpu.txt; fi \
 && pip install --no-cache-dir -c /tmp/constraints-cpu.txt torch \
 && pip install --no-cache-dir -c /tmp/constraints-cpu.txt "$(echo /wheels/*.whl)[$EXTRAS]" \
 && rm -rf /wheels /tmp/constraints-cpu.txt
RUN useradd --create-home --uid 10001 batchgen
USER batchgen
WORKDIR /work
ENTRYPOINT ["batchgen"]
