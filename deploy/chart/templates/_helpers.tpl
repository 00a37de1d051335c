{{- define "diptych.name" -}}
{{- if contains "diptych" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-diptych{{ end -}}
{{- end }}

{{- /* Labels of a component: (dict "root" $ "component" "gateway"). */}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
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
