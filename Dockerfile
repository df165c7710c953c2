# syntax=docker/dockerfile:1
# A peer in a box: `docker run --network host meshcee peer --join TOKEN`.
#
# For the CPU by default. For NVIDIA GPUs build with
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t meshcee:cuda .
# and run with --gpus all.
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
RUN /venv/bin/pip install -c constraints.txt .

FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 meshcee
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER meshcee
# The identity of a peer lives here: mount a volume to keep it when the container is replaced.
WORKDIR /home/meshcee
ENTRYPOINT ["meshcee"]
CMD ["--help"]
