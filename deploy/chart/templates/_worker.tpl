{{- /* Pod of a worker: (dict "root" $ "group" …), a group of diptych.workers. */}}
{{- define "diptych.worker" -}}
{{- $root := .root }}
{{- $group := .group }}
{{- $role := $group.role }}
{{- $port := $group.port }}
{{- $values := $group.values }}
{{- $certificate := index $root.Values.internalTls $role }}
{{- $scheme := empty $certificate | ternary "" ", scheme: HTTPS" }}
{{- $mounts := or $certificate $root.Values.model.claim $values.gpus (gt (int $group.hosts) 1) }}
{{- /* 10 s for a step that is being computed and the last spans. */}}
{{- $grace := add $values.shutdownSeconds 10 }}
{{- include "diptych.pod" (dict "root" $root "component" $role "model" $group.model "values" $values "grace" $grace) }}
containers:
  - name: {{ $role }}
    image: {{ include "diptych.image" $root }}
    args: [{{ $role }}, --grpc-port, {{ $port | quote }}, --http-port, "8000"]
    envFrom: [{configMapRef: {name: {{ include "diptych.name" $root }}}}]
    env:
      # A container that is started again in its pod is known to have died, one in a new pod by silence.
      {{- include "diptych.environment" $root | nindent 6 }}
      - {name: DIPTYCH_ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      - {name: DIPTYCH_WORKER_SHUTDOWN_TIMEOUT, value: {{ $values.shutdownSeconds | quote }}}
      {{- with $group.path }}
      - {name: DIPTYCH_MODEL, value: {{ printf "/models/%s" . | quote }}}
      {{- end }}
      {{- if $certificate }}
      - {name: DIPTYCH_INTERNAL_TLS, value: /access/internal-tls}
      {{- end }}
      {{- with $values.kvMemoryMib }}
      - {name: DIPTYCH_KV_MEMORY_MIB, value: {{ . | quote }}}
      {{- end }}
      {{- if $values.gpus }}
      # Triton builds kernels at the first start and keeps them: the one thing that a worker writes.
      - {name: TRITON_CACHE_DIR, value: /cache/triton}
      - {name: TMPDIR, value: /cache}
      {{- end }}
      {{- include "diptych.processes" $group | nindent 6 }}
      {{- include "diptych.variables" $values.environment | nindent 6 }}
    ports:
      - {name: grpc, containerPort: {{ $port }}}
      - {name: http, containerPort: 8000}
    # Its ports open when the weights are loaded and a probe inference has passed: ten minutes at most.
    startupProbe: {httpGet: {path: /ready, port: http{{ $scheme }}}, periodSeconds: 2, failureThreshold: 300}
    # For rollouts only: gateways hear from the worker itself that it drains.
    readinessProbe: {httpGet: {path: /ready, port: http{{ $scheme }}}, periodSeconds: 2, failureThreshold: 2, timeoutSeconds: 2}
    # Says no when a step is a minute past its own generous prediction; busy is not stuck.
    livenessProbe: {httpGet: {path: /health, port: http{{ $scheme }}}, periodSeconds: 10, failureThreshold: 4, timeoutSeconds: 5}
    resources:
      {{- $limits := $values.resources.limits }}
      {{- if $values.gpus }}{{ $limits = merge (dict "nvidia.com/gpu" ($values.gpus | toString)) $limits }}{{ end }}
      requests: {{- toYaml $values.resources.requests | nindent 8 }}
      limits: {{- toYaml $limits | nindent 8 }}
    securityContext: {{- include "diptych.security" $root | nindent 6 }}
    volumeMounts:
      {{- if $certificate }}
      - {name: internal-tls, mountPath: /access/internal-tls, readOnly: true}
      {{- end }}
      {{- if $root.Values.model.claim }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
      {{- if gt (int $group.hosts) 1 }}
      - {name: rank-key, mountPath: /access/ranks, readOnly: true}
      {{- end }}
      {{- if $values.gpus }}
      - {name: cache, mountPath: /cache}
      {{- end }}
      {{- if not $mounts }} []{{ end }}
volumes:
  {{- with $certificate }}
  - {name: internal-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
  {{- end }}
  {{- with $root.Values.model.claim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
  {{- end }}
  {{- if gt (int $group.hosts) 1 }}
  {{- include "diptych.rankKey" $root | nindent 2 }}
  {{- end }}
  {{- if $values.gpus }}
  - {name: cache, emptyDir: {sizeLimit: 2Gi}}
  {{- end }}
  {{- if not $mounts }} []{{ end }}
{{- end }}

{{- /* Variables of a worker of several processes. Ranks on other nodes join at the pod's own address. */}}
{{- define "diptych.processes" -}}
{{- if gt (int .values.tensorParallel) 1 }}
- {name: DIPTYCH_TENSOR_PARALLEL, value: {{ .values.tensorParallel | quote }}}
{{- end }}
{{- if gt (int .values.pipelineParallel) 1 }}
- {name: DIPTYCH_PIPELINE_PARALLEL, value: {{ .values.pipelineParallel | quote }}}
{{- end }}
{{- if gt (int .parts) 1 }}
- {name: DIPTYCH_SUM_PARTS, value: {{ .parts | quote }}}
{{- end }}
{{- if gt (int .hosts) 1 }}
- {name: DIPTYCH_REMOTE_RANKS, value: {{ sub (int .hosts) 1 | quote }}}
- {name: DIPTYCH_RENDEZVOUS, value: "$(DIPTYCH_ADVERTISE_HOST):7001"}
- {name: DIPTYCH_RANK_KEY_FILE, value: /access/ranks/rank-key}
{{- end }}
{{- end }}

{{- define "diptych.rankKey" -}}
- {name: rank-key, secret: {secretName: {{ .Values.secrets.programs }}, items: [{key: rank-key, path: rank-key}], defaultMode: 0440}}
{{- end }}
