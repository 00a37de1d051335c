{{- define "diptych.name" -}}
{{- if contains "diptych" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-diptych{{ end -}}
{{- end }}

{{- /* Labels of a component: (dict "root" $ "component" "gateway"); of several models with "model" "NAME", too. */}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
diptych/model: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Groups of workers as JSON, one for each role and model that has any: role, port, model (empty for the only one),
path, name and kind of the object that makes them, pods and processes of each worker, parts of the model's sums, values,
and its part of `autoscaling`. */}}
{{- define "diptych.workers" -}}
{{- $root := . }}
{{- $found := list }}
{{- $models := .Values.models | default (list dict) }}
{{- range $model := $models }}
{{- range $role, $port := dict "prefill" 50061 "decode" 50062 "encode" 50063 }}
{{- $values := mergeOverwrite (deepCopy (index $root.Values $role)) (deepCopy (index $model $role | default dict)) }}
{{- $scaling := deepCopy (index $root.Values.autoscaling $role | default dict) }}
{{- $scaling = mergeOverwrite $scaling (deepCopy (index ($model.autoscaling | default dict) $role | default dict)) }}
{{- if $values.replicas }}
{{- $name := printf "%s-%s" (include "diptych.name" $root) $role }}
{{- $hosts := $values.hosts | default 1 }}
{{- $processes := mul ($values.tensorParallel | default 1) ($values.pipelineParallel | default 1) }}
{{- $kind := gt (int $hosts) 1 | ternary "LeaderWorkerSet" "Deployment" }}
{{- $parts := eq $role "encode" | ternary "1" (include "diptych.parts" (dict "root" $root "model" $model)) }}
{{- if $model.name }}{{ $name = printf "%s-%s" $name $model.name }}{{ end }}
{{- $found = append $found (dict "role" $role "port" $port "model" ($model.name | default "") "path" ($model.path | default "") "name" $name "kind" $kind "hosts" $hosts "processes" $processes "parts" $parts "values" $values "scaling" $scaling) }}
{{- end }}
{{- end }}
{{- end }}
{{- $found | toJson }}
{{- end }}

{{- /* Least number of parts that suits prefill and decode workers of a model: (dict "root" $ "model" …). 1 leaves it to them. */}}
{{- define "diptych.parts" -}}
{{- $degrees := list }}
{{- range $role := list "prefill" "decode" }}
{{- $own := index $.model $role | default dict }}
{{- $degrees = append $degrees (int ($own.tensorParallel | default (index $.root.Values $role "tensorParallel"))) }}
{{- end }}
{{- $one := first $degrees }}
{{- $other := last $degrees }}
{{- $found := 0 }}
{{- range $parts := untilStep $one (int (add1 (mul $one $other))) $one }}
{{- if and (not $found) (eq (mod $parts $other) 0) }}{{ $found = $parts }}{{ end }}
{{- end }}
{{- hasKey .root.Values.environment "DIPTYCH_SUM_PARTS" | ternary 1 $found }}
{{- end }}

{{- /* Roles of which some model has workers. */}}
{{- define "diptych.roles" -}}
{{- $roles := list }}
{{- range include "diptych.workers" . | fromJsonArray }}{{ $roles = append $roles .role }}{{ end }}
{{- $roles | uniq | toJson }}
{{- end }}

{{- /* Variables of the gateway for several models and for names that stand for them. */}}
{{- define "diptych.models" -}}
{{- $parts := list }}
{{- range .Values.models }}{{ $parts = append $parts (printf "%s=/models/%s" .name .path) }}{{ end }}
{{- with $parts }}
- {name: DIPTYCH_MODEL, value: {{ join "," . | quote }}}
{{- end }}
{{- $parts = list }}
{{- range $name, $shares := .Values.aliases }}
{{- $shared := list }}
{{- range $model, $weight := $shares }}{{ $shared = append $shared (printf "%s:%v" $model $weight) }}{{ end }}
{{- $parts = append $parts (printf "%s=%s" $name (join "," $shared)) }}
{{- end }}
{{- with $parts }}
- {name: DIPTYCH_MODEL_SPLIT, value: {{ join "," . | quote }}}
{{- end }}
{{- end }}

{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "diptych.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "diptych.security" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}

{{- /* Variables of one map, in the order of their names. */}}
{{- define "diptych.variables" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- /* Name and directory of every program. */}}
{{- define "diptych.environment" -}}
- {name: DIPTYCH_WORKER_ID, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: DIRECTORY_PASSWORD, valueFrom: {secretKeyRef: {name: {{ .Values.secrets.programs }}, key: directory-password}}}
- name: DIPTYCH_REDIS_URL
  value: {{ .Values.directory.url | default (printf "redis://:$(DIRECTORY_PASSWORD)@%s-valkey:6379/0" (include "diptych.name" .)) | quote }}
{{- end }}

{{- /* Pod of a program, up to its containers: (dict "root" $ "component" "gateway" "values" .Values.gateway "grace" 75). */}}
{{- define "diptych.pod" -}}
# Variables of a Service named `diptych-grpc` would be read as flags: DIPTYCH_GRPC_PORT=tcp://…
enableServiceLinks: false
automountServiceAccountToken: false
# Then pid 1 is not ours: the kernel spares a pid 1 the SIGTERM that comes while it starts.
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "diptych.selector" . | nindent 8 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .values.tolerations .values.gpus }}
tolerations:
{{- if .values.gpus }}
  - {key: nvidia.com/gpu, operator: Exists}
{{- end }}
{{- with .values.tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}

{{- define "diptych.strategy" -}}
{{- if .surge }}{rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}{{ else }}{rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}{{ end }}
{{- end }}

{{- define "diptych.from" }}
- podSelector:
    matchLabels: {{- include "diptych.selector" . | nindent 6 }}
{{- end }}

{{- define "diptych.scraped" }}
{{- if .Values.metrics.enabled }}
- from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .Values.metrics.namespace }}}}}]
  ports: [{port: http}]
{{- end }}
{{- end }}

{{- /* A worker that stops moves its streams, and their prompts are computed again: scale down rarely. */}}
{{- define "diptych.rarely" }}
scaleDown: {stabilizationWindowSeconds: 600, policies: [{type: Pods, value: 1, periodSeconds: 300}]}
{{- end }}
