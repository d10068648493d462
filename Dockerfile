# quire serve, on CPUs (the default) or on NVIDIA GPUs: docker build --build-arg EXTRAS=[gpu,uvloop] -t quire:gpu .
FROM python:3.12-slim AS build
ARG EXTRAS=[uvloop]
# hadolint ignore=DL3008  # any g++ of this release will do
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The versions that are tested. The kernels are compiled for every x86-64 or Arm machine and choose their instructions.
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir -c constraints.txt ".${EXTRAS}"

FROM python:3.12-slim
COPY --from=build /opt/quire /opt/quire
# Models are kept in the volume /models. Everything else that is written goes to /tmp.
RUN useradd --uid 10001 --no-create-home quire && install -d -o quire /models
ENV PATH=/opt/quire/bin:$PATH \
    QUIRE_CACHE=/models \
    HOME=/tmp
USER 10001
VOLUME /models
EXPOSE 8000
# SIGTERM lets running requests finish (--drain-timeout).
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0"]
