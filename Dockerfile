# NeoServe for linux/amd64 and linux/arm64. docs/containers.md tells how to build and run it.
#
#   docker buildx build --platform linux/arm64 --tag neoserve .
#
# Without a checkout, by this file alone, the sources come from a repository named as the context "source":
#
#   docker buildx build --build-context source=https://github.com/OWNER/neoserve.git --tag neoserve - <Dockerfile
ARG BASE=debian:12-slim

# What the build reads, and nothing else. A stage of its own, so that --build-context source=... can replace it.
FROM scratch AS source
COPY pyproject.toml CMakeLists.txt LICENSE README.md /
COPY cmake /cmake
COPY native /native
COPY python /python
COPY deploy /deploy

FROM ${BASE} AS build
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# hadolint ignore=DL3008 # Debian 12 keeps the versions; pinning them would keep security updates out
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# The packages come before the sources, so that a change of the sources leaves these layers as they are.
COPY --from=source /deploy/build-requirements.txt /deploy/requirements.txt /deploy/
RUN python3 -m venv /opt/build \
    && pip install --require-hashes --only-binary :all: --requirement /deploy/build-requirements.txt \
    && python3 -m venv --without-pip /opt/neoserve \
    && pip --python /opt/neoserve/bin/python install --no-compile --require-hashes --only-binary :all: \
        --requirement /deploy/requirements.txt
COPY --from=source / /src/
# These change with every commit or machine, so they stand behind the layers that do not: the time stamp of the wheel's
# files, and another compiler than Debian's g++.
ARG SOURCE_DATE_EPOCH
ARG CXX
# The packages' own tests stay out. Bytecode that is not compared with its source starts faster on a read-only root, and is the same in every build.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /src \
    && pip --python /opt/neoserve/bin/python install --no-compile --no-deps /wheels/*.whl \
    && cp /src/deploy/healthcheck.py /opt/neoserve/healthcheck.py \
    && find /opt/neoserve/lib -type d -name tests -prune -exec rm -rf {} + \
    && /opt/neoserve/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/neoserve/lib

FROM ${BASE}
# hadolint ignore=DL3008 # as above
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ca-certificates libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /cache --shell /usr/sbin/nologin neoserve \
    && install --directory --owner 10001 --group 0 --mode 2775 /cache
COPY --from=build /opt/neoserve /opt/neoserve
# Models, tokenizers and the hub's files lie in /cache. Any user of group 0 may write there, as OpenShift runs it.
ENV PATH=/opt/neoserve/bin:$PATH \
    HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
VOLUME ["/cache"]
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 \
    CMD ["/opt/neoserve/bin/python", "-IS", "/opt/neoserve/healthcheck.py"]
# Arguments of `docker run` follow: a model, and flags. --host and --port given there win.
ENTRYPOINT ["/opt/neoserve/bin/neoserve", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD []
ARG BASE
ARG VERSION=0.0.0+unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="NeoServe" \
      org.opencontainers.image.description="Serves large language models on CPU servers: Arm Neoverse and x86-64, OpenAI-compatible" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
