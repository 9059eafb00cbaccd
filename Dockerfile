# Images of sheeplike: docker build --target cpu -t sheeplike:cpu .   or   --target cuda -t sheeplike:cuda
# The wheels of torch, JAX and Warp bring CUDA, so the cuda image needs only the host's driver: 580 or newer.

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY sheeplike sheeplike
COPY configs configs
RUN python -m pip wheel --no-deps --wheel-dir /dist .

FROM python:3.11-slim AS base
# The compiler of fused kernels.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home sheeplike && install --directory --owner=sheeplike --group=sheeplike /cache /workspace
COPY --from=wheel /dist /dist
ENV PYTHONUNBUFFERED=1 SHEEPLIKE_CACHE_DIR=/cache

FROM base AS cuda
RUN python -m pip install --no-cache-dir "$(echo /dist/*.whl)[cuda13]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /workspace
VOLUME /cache
ENTRYPOINT ["python", "-m", "sheeplike"]

FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip install --no-cache-dir /dist/*.whl --extra-index-url "$TORCH_INDEX"
USER 1000
WORKDIR /workspace
VOLUME /cache
ENTRYPOINT ["python", "-m", "sheeplike"]
