# syntax=docker/dockerfile:1
# A peer in a box: `docker build -t meshcee .`, then `docker run --network host -v meshcee:/data meshcee peer --join TOKEN`.
#
# For the CPU by default. For NVIDIA GPUs build with
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t meshcee:cuda .
# and run with --gpus all. Nothing here names an architecture; for amd64 and arm64 at once:
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/meshcee --push .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /venv
WORKDIR /src
# torch changes less often than the code, so it has a layer of its own.
COPY constraints.txt ./
RUN /venv/bin/pip install -c constraints.txt --extra-index-url "${TORCH_INDEX}" torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY examples examples
COPY meshcee meshcee
COPY dht dht
COPY peers peers
RUN /venv/bin/pip install -c constraints.txt '.[ui,metrics,top]'

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --create-home meshcee && install -d -o meshcee -g meshcee /data /invite
COPY --from=build /venv /venv
# /data holds the peer's identity and its runs: mount a volume there to keep them when the container is replaced.
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 MESHCEE_HOME=/data
USER 10001
WORKDIR /data
# No HEALTHCHECK: a peer that cannot go on exits, and a restart policy sees that; `meshcee status` asks the whole mesh.
ENTRYPOINT ["meshcee"]
CMD ["--help"]
